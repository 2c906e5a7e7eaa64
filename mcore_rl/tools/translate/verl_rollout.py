"""Engines, sampling and turns of verl 0.7, as options of a recipe."""

from mcore_rl.tools.translate.foreign import Decision, ForeignOptions, Found, RecipeLine
from mcore_rl.tools.translate.verl_training import ROLLOUT, shared

TURNS = f"{ROLLOUT}.multi_turn"


def translate_engines(options: ForeignOptions) -> Found:
    """Yield how many engines there are, where, and what each is made of."""
    sizes = {}
    for ours, (theirs, default) in {
        "tp": ("tensor_model_parallel_size", 2),
        "pp": ("pipeline_model_parallel_size", 1),
        "ep": ("expert_parallel_size", 1),
    }.items():
        sizes[ours] = options.take(f"{ROLLOUT}.{theirs}", default)
        if sizes[ours] > 1:
            yield RecipeLine(f"rollout.{ours}", sizes[ours], (f"{ROLLOUT}.{theirs}",))
    yield from _placement(options, sizes["tp"] * sizes["pp"])
    dp = options.take(f"{ROLLOUT}.data_parallel_size", 1)
    if dp > 1:
        advice = "for DP attention set rollout.attention_dp, and rollout.tp to all ranks of an"
        yield Decision(
            f"{ROLLOUT}.data_parallel_size", dp, f"{advice} engine; else rollout.engines"
        )
    share = options.take(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
    yield Decision(
        f"{ROLLOUT}.gpu_memory_utilization",
        share,
        "set rollout.kv_cache_len, in tokens per engine, by what `mcore-rl plan` says is free",
    )
    requests = options.take(f"{ROLLOUT}.max_num_seqs", 1024)
    yield RecipeLine("rollout.max_concurrency", requests, (f"{ROLLOUT}.max_num_seqs",))
    kind = options.take(f"{ROLLOUT}.quantization", None)
    if kind == "fp8":
        yield RecipeLine("rollout.quantization", "fp8", (f"{ROLLOUT}.quantization",))
    elif kind is not None:
        advice = "rollout.quantization has none and fp8"
        yield Decision(f"{ROLLOUT}.quantization", kind, advice)
    engine = f"{ROLLOUT}.engine_kwargs.sglang."
    for name, value in options.below(engine).items():
        yield RecipeLine(f"rollout.sglang.{name}", value, (f"{engine}{name}",))


def _placement(options: ForeignOptions, ranks: int) -> Found:
    nodes = shared(options, "trainer.nnodes")
    gpus = shared(options, "trainer.n_gpus_per_node")
    apart = options.take(f"{ROLLOUT}.nnodes", 0)
    if apart:
        per_node = options.take(f"{ROLLOUT}.n_gpus_per_node", gpus)
        sources = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
        yield RecipeLine("rollout.engines", max(apart * per_node // ranks, 1), sources)
        advice = "rollout.mode is sync, one_step_off or async here (docs/async.md)"
        yield Decision(f"{ROLLOUT}.nnodes", apart, advice)
        yield from _several_nodes(nodes + apart)
        return
    sources = ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size")
    yield RecipeLine("rollout.engines", max(nodes * gpus // ranks, 1), sources)
    if shared(options, "actor_rollout_ref.hybrid_engine"):
        yield RecipeLine("cluster.colocated", True, ("actor_rollout_ref.hybrid_engine",))
        # A recipe with engines on the trainer's GPUs has to have these.
        yield RecipeLine("rollout.stage_weights", False)
        yield RecipeLine("rollout.restarts", 0)
    yield from _several_nodes(nodes)


def _several_nodes(nodes: int) -> Found:
    if nodes > 1:
        advice = (
            "`mcore-rl submit` finds it from the ranks of the recipe (docs/launch.md); on a Ray"
        )
        advice += " of your own set cluster.address and cluster.num_nodes"
        yield Decision("trainer.nnodes", nodes, advice)


def translate_sampling(options: ForeignOptions) -> Found:
    samples = options.take(f"{ROLLOUT}.n", 1)
    yield RecipeLine("rollout.samples_per_prompt", samples, (f"{ROLLOUT}.n",))
    longest = shared(options, "data.max_response_length")
    yield RecipeLine("rollout.max_response_len", longest, ("data.max_response_length",))
    for name, default in {"temperature": 1.0, "top_p": 1.0, "top_k": -1}.items():
        value = options.take(f"{ROLLOUT}.{name}", default)
        if value != default:
            yield RecipeLine(f"rollout.{name}", value, (f"{ROLLOUT}.{name}",))
    yield from _evaluation(options)
    over = options.take(f"{ROLLOUT}.over_sample_rate", 0)
    if over:
        advice = "rollout.mode=async goes on without waiting for the last responses"
        yield Decision(f"{ROLLOUT}.over_sample_rate", over, advice)


def _evaluation(options: ForeignOptions) -> Found:
    group = f"{ROLLOUT}.val_kwargs"
    several = options.take(f"{group}.n", 1)
    if several > 1:
        yield RecipeLine("eval.pass_k", several, (f"{group}.n",))
    if not options.take(f"{group}.do_sample", False):
        return
    yield RecipeLine("eval.samples", several, (f"{group}.do_sample", f"{group}.n"))
    for name, default in {"temperature": 0, "top_p": 1.0}.items():
        value = options.take(f"{group}.{name}", default)
        if value:
            yield RecipeLine(f"eval.{name}", value, (f"{group}.{name}",))


def translate_turns(options: ForeignOptions) -> Found:
    """Yield the environment of episodes of several turns; nothing without one."""
    loop = options.take(f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    custom = options.take(f"{ROLLOUT}.agent.agent_loop_config_path", None)
    if custom is not None or loop not in ("single_turn_agent", "tool_agent"):
        advice = "write it as an environment or a program of its own (docs/agents.md)"
        name = "default_agent_loop" if custom is None else "agent_loop_config_path"
        yield Decision(f"{ROLLOUT}.agent.{name}", custom or loop, advice)
    if not options.take(f"{TURNS}.enable", loop == "tool_agent"):
        return
    tools = options.take(f"{TURNS}.tool_config_path", options.take("data.tool_config_path", None))
    interaction = options.take(f"{TURNS}.interaction_config_path", None)
    for path, kind, name in (
        (interaction, "verl_interaction", f"{TURNS}.interaction_config_path"),
        (tools, "verl_tools", f"{TURNS}.tool_config_path"),
    ):
        if path is not None:
            yield RecipeLine("agents.environment", kind, (name, f"{TURNS}.enable"))
            yield RecipeLine("agents.options.config", path, (name,))
            break
    if tools is None and interaction is None:
        advice = "neither tools nor an interaction are given: set agents.environment"
        yield Decision(f"{TURNS}.enable", True, advice)
    if tools is not None and interaction is not None:
        advice = "an episode has one environment: give the tools to the interaction's class"
        yield Decision(f"{TURNS}.tool_config_path", tools, advice)
    turns = options.take(f"{TURNS}.max_assistant_turns", None)
    if turns is not None:
        yield RecipeLine("agents.max_turns", turns, (f"{TURNS}.max_assistant_turns",))
    for name in ("max_user_turns", "max_parallel_calls", "max_tool_response_length"):
        value = options.take(f"{TURNS}.{name}", None)
        if value is not None and not options.is_whole:
            advice = "see the environment's own options, agents.options.* (docs/agents.md)"
            yield Decision(f"{TURNS}.{name}", value, advice)
