"""Converts model, layout, optimizer, engines, sampling and turns of verl 0.9 into options."""

import math
from collections.abc import Iterator
from typing import Any

from mcore_rl.config.training import RECOMPUTABLE
from mcore_rl.tools.translate.stages import read_num_experts, read_num_layers, translate_ends
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    hold_longest,
    translate_muon,
)
from mcore_rl.tools.translate.verl_modes import translate_placement
from mcore_rl.tools.translate.verl_shared import (
    ACTOR,
    MODEL,
    ROLLOUT,
    home_of,
    is_colocated,
    is_megatron,
    take_prompts,
    take_shared,
)

SCHEDULES = ("constant", "linear", "cosine")
OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")
MUON = (
    *("momentum", "nesterov", "split_qkv", "scale_mode", "coefficient_type", "num_ns_steps"),
    *("tp_mode", "fp32_matmul_prec", "extra_scale_factor", "scalar_optimizer"),
)
"""Options of Muon, without the "muon_" with which their names begin."""
STAGE_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
ALL_LINEAR = "all-linear"
"""Stands for all linear layers among PEFT's target modules, which an empty list stands for here."""
SPLITS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
OWN_TRANSFORMER = ("recompute_", "attention_backend", *STAGE_ENDS, *SPLITS)
"""Fields of the transformer's configuration that are not handed on as they are."""


def translate_model(options: ForeignOptions, model: str = MODEL) -> Found:
    """Yield what is trained; `model` is the group of its options."""
    yield RecipeLine("model.path", home_of(options.take(f"{model}.path", "")), (f"{model}.path",))
    yield RecipeLine("model.dtype", "bfloat16")
    if options.take(f"{model}.trust_remote_code", False):
        yield RecipeLine("model.trust_remote_code", True, (f"{model}.trust_remote_code",))
    frozen = f"{model}.override_config.moe_config.freeze_moe_router"
    if options.take(frozen, False):
        yield RecipeLine("train.freeze_router", True, (frozen,))
    tower = f"{ACTOR}.freeze_vision_tower"
    if options.take(tower, False):
        yield RecipeLine("train.vision", "none", (tower,))
    override = f"{model}.override_config."
    for name, value in options.below(override, but=("attn_implementation", "moe_config.")).items():
        advice = "the model is what its config.json says: change it in a copy of model.path"
        yield Decision(f"{override}{name}", value, advice)
    if not is_megatron(options):
        yield from translate_factors(options, model, "train.lora")
    for name in ("lora_rank", "lora.rank") if is_megatron(options) else ():
        rank = options.take(f"{model}.{name}", 0)
        if rank:
            advice = "set train.lora.rank, alpha and targets by names of HuggingFace modules"
            yield Decision(f"{model}.{name}", rank, f"{advice} (docs/lora.md)")
    for name in ("enable", "enable_train", "enable_rollout"):
        if options.take(f"{model}.mtp.{name}", False):
            advice = "set train.mtp_loss; engines use them with rollout.speculate=mtp (docs/mtp.md)"
            yield Decision(f"{model}.mtp.{name}", True, advice)
    for name, advice in {
        "tokenizer_path": "the tokenizer is that of model.path: put it there",
        "custom_chat_template": "put it into model.path, as chat_template.jinja",
        "external_lib": "families of models are tables here (docs/models.md)",
    }.items():
        value = options.take(f"{model}.{name}", None)
        if value is not None and value != options.given.get(f"{model}.path"):
            yield Decision(f"{model}.{name}", value, advice)


def translate_factors(options: ForeignOptions, model: str, ours: str) -> Found:
    """Yield low-rank factors, if there are any: verl names modules as PEFT does, where FSDP trains.

    model   the group that has them
    ours    the group that gets them
    """
    source = f"{model}.lora_rank"
    rank = options.take(source, 0)
    if not rank:
        return
    yield RecipeLine(f"{ours}.rank", rank, (source,))
    alpha = f"{model}.lora_alpha"
    yield RecipeLine(f"{ours}.alpha", float(options.take(alpha, 16)), (alpha,))
    modules: Any = options.take(f"{model}.target_modules", ALL_LINEAR)
    names = [modules] if isinstance(modules, str) else list(modules)
    if names != [ALL_LINEAR]:
        yield RecipeLine(f"{ours}.targets", names, (f"{model}.target_modules",))
    excluded = options.take(f"{model}.exclude_modules", None)
    if excluded:
        advice = f"name in {ours}.targets those that have factors (docs/lora.md)"
        yield Decision(f"{model}.exclude_modules", excluded, advice)
    begun = options.take(f"{model}.lora_adapter_path", None)
    if begun is not None and ours == "train.lora":
        yield RecipeLine(f"{ours}.path", begun, (f"{model}.lora_adapter_path",))
    elif begun is not None:
        advice = "a critic's factors begin at zero: merge those of this folder into critic.path"
        yield Decision(f"{model}.lora_adapter_path", begun, advice)


def translate_layout(options: ForeignOptions) -> Found:
    """Yield parallel.*, and what an idle part of a GPU does with its memory."""
    if is_megatron(options):
        yield from layout_of(options, f"{ACTOR}.megatron", "parallel")
    else:
        yield from layout_of_fsdp(options, "parallel")
        engine = options.take("model_engine", "dp")
        yield Decision(
            f"{ACTOR}.strategy" if engine == "dp" else "model_engine",
            "fsdp" if engine == "dp" else engine,
            "Megatron trains here, with parallel.tp of the engines: try others, pp and ep by"
            " `mcore-rl plan`; train.optimizer.megatron has the precision of the moments",
        )
    group = "megatron" if is_megatron(options) else "fsdp_config"
    offloads = [f"{ACTOR}.{group}.{name}" for name in OFFLOADS]
    offloaded = tuple([name for name in offloads if options.take(name, False)])
    if offloaded and is_colocated(options):
        yield RecipeLine("cluster.offload", True, offloaded)
    elif offloaded:
        advice = "the trainer's memory is freed for engines on its GPUs only: cluster.colocated"
        yield Decision(", ".join(offloaded), True, advice)
    if is_megatron(options):
        yield from translate_overrides(options, f"{ACTOR}.megatron", "train")
    elif options.take(f"{MODEL}.enable_gradient_checkpointing", True):
        yield RecipeLine("train.recompute", "full", (f"{MODEL}.enable_gradient_checkpointing",))


def layout_of(options: ForeignOptions, group: str, ours: str, model: str = MODEL) -> Found:
    """Yield the parallel sizes of a Megatron group of verl's as options under `ours`.

    All GPUs of the trainer are used: what they are more than tp * pp * cp is data parallel.
    """
    names = [f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline")]
    names.append("context_parallel_size")
    ranks = math.prod(options.take(f"{group}.{name}", 1) for name in names)
    yield data_parallel(options, ours, ranks)
    for name, theirs in {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
    }.items():
        # Megatron's own default of the experts' tensor parallelism is that of the dense layers.
        tp = options.take(f"{group}.tensor_model_parallel_size", 1)
        default = {"etp": tp, "vpp": None}.get(name, 1)
        size: Any = options.take(f"{group}.{theirs}", default)
        if size not in (1, None):
            yield RecipeLine(f"{ours}.{name}", size, (f"{group}.{theirs}",))
    yield from _stages_of(options, group, ours, model)


def _stages_of(options: ForeignOptions, group: str, ours: str, model: str) -> Found:
    config = f"{group}.override_transformer_config"
    ends = {name: options.take(name, None) for name in (f"{config}.{end}" for end in STAGE_ENDS)}
    for split in SPLITS:
        if options.take(f"{config}.{split}", False):
            advice = f"set {ours}.stage_layers, the layers of each stage"
            yield Decision(f"{config}.{split}", True, advice)
    pp = options.take(f"{group}.pipeline_model_parallel_size", 1)
    vpp = options.take(f"{group}.virtual_pipeline_model_parallel_size", None)
    path = home_of(options.take(f"{model}.path", ""))
    layers = read_num_layers(path) if vpp is None else None
    yield from translate_ends(ours, pp, ends, layers, ())


def layout_of_fsdp(options: ForeignOptions, ours: str) -> Iterator[RecipeLine]:
    """Yield the ranks that share a sequence, and those that share the weights, as engines do.

    FSDP shards weights and gradients over all GPUs, which data-parallel ranks do not; experts are
    divided among the GPUs of a node, if config.json is here to name them.
    """
    name = f"{ACTOR}.ulysses_sequence_parallel_size"
    cp = options.take(name, 1)
    yield RecipeLine(f"{ours}.cp", cp, (name,))
    name = f"{ROLLOUT}.tensor_model_parallel_size"
    gpus = take_shared(options, "trainer.n_gpus_per_node")
    tp = math.gcd(options.take(name, 2), max(gpus // cp, 1))
    yield RecipeLine(f"{ours}.tp", tp, (name,))
    experts = read_num_experts(home_of(options.take(f"{MODEL}.path", "")))
    if experts is not None:
        yield RecipeLine(f"{ours}.ep", math.gcd(experts, gpus), (f"{MODEL}.path",))
    yield data_parallel(options, ours, tp * cp)


def data_parallel(options: ForeignOptions, ours: str, ranks: int) -> RecipeLine:
    """Return the copies of a model of so many ranks that all GPUs hold."""
    gpus = take_shared(options, "trainer.nnodes") * take_shared(options, "trainer.n_gpus_per_node")
    sources = ("trainer.nnodes", "trainer.n_gpus_per_node")
    return RecipeLine(f"{ours}.dp", max(gpus // ranks, 1), sources)


def translate_overrides(options: ForeignOptions, group: str, ours: str) -> Found:
    """Yield what Megatron computes again, and the fields that are handed on to it."""
    config = f"{group}.override_transformer_config"
    granularity = options.take(f"{config}.recompute_granularity", None)
    if granularity == "full":
        yield RecipeLine(f"{ours}.recompute", "full", (f"{config}.recompute_granularity",))
    elif granularity == "selective":
        sources = (f"{config}.recompute_granularity", f"{config}.recompute_modules")
        modules = options.take(f"{config}.recompute_modules", ["core_attn"])
        known = [module for module in modules if module in RECOMPUTABLE]
        yield RecipeLine(f"{ours}.recompute", "+".join(known) or "none", sources)
        for module in set(modules) - set(known):
            yield Decision(f"{config}.recompute_modules", module, "recomputed by no recipe")
    elif granularity is not None:
        yield Decision(f"{config}.recompute_granularity", granularity, "train.recompute has others")
    passed = options.below(f"{config}.", but=OWN_TRANSFORMER)
    for name, value in passed.items():
        yield RecipeLine(f"{ours}.megatron.{name}", value, (f"{config}.{name}",))
    for name, advice in {
        "use_megatron_fsdp": "weights are sharded by parallel.* alone, as weight sync reads them",
        "dynamic_context_parallel": "each sequence is divided among parallel.cp ranks",
    }.items():
        if options.take(f"{group}.{name}", False):
            yield Decision(f"{group}.{name}", True, advice)
    if options.take(f"{group}.qat.enable", False):
        advice = "weights are rounded by train.megatron.fp8 and fp4 alone, whose engines have"
        yield Decision(f"{group}.qat.enable", True, f"{advice} rollout.quantization")
    for name, value in options.below(f"{group}.override_ddp_config.").items():
        yield RecipeLine(f"{ours}.ddp.{name}", value, (f"{group}.override_ddp_config.{name}",))


def translate_optimizer(options: ForeignOptions, theirs: str, ours: str, lr: float) -> Found:
    """Yield the options of an optimizer; `lr` is verl's default for it."""
    yield RecipeLine(f"{ours}.lr", options.take(f"{theirs}.lr", lr), (f"{theirs}.lr",))
    decay = options.take(f"{theirs}.weight_decay", 0.01)
    yield RecipeLine(f"{ours}.weight_decay", decay, (f"{theirs}.weight_decay",))
    betas = options.take(f"{theirs}.betas", [0.9, 0.999])
    for i, beta in enumerate(betas, 1):
        yield RecipeLine(f"{ours}.beta{i}", beta, (f"{theirs}.betas",))
    names = (f"{theirs}.clip_grad", f"{theirs}.grad_clip", f"{theirs[: -len('.optim')]}.grad_clip")
    clips = [name for name in names if options.take(name, None) is not None]
    yield RecipeLine(f"{ours}.clip_grad", options.given[clips[0]] if clips else 1.0, tuple(clips))
    if is_megatron(options):
        yield from _choose_optimizer(options, theirs, ours, betas[0])
    yield from _schedule(options, theirs, ours)
    override = f"{theirs}.override_optimizer_config."
    for name, value in options.below(override).items():
        yield RecipeLine(f"{ours}.megatron.{name}", value, (f"{override}{name}",))


def _choose_optimizer(options: ForeignOptions, theirs: str, ours: str, beta1: float) -> Found:
    """Yield Muon or the precision-aware Adam, each with its own options, where it is chosen."""
    fields = {field: f"{theirs}.muon_{field}" for field in MUON}
    yield from translate_muon(options, f"{theirs}.optimizer", ours, fields)
    matches = f"{theirs}.muon_match_adamw_update_rms"
    if options.take(matches, False):
        factor = math.sqrt((1 - beta1) / (1 + beta1))
        advice = f"set {ours}.megatron.muon_extra_scale_factor to {factor:.4f}"
        yield Decision(matches, True, advice)
    layer_wise = f"{theirs}.use_layer_wise_distributed_optimizer"
    if options.take(layer_wise, False):
        key = f"{ours}.megatron.use_layer_wise_distributed_optimizer"
        yield RecipeLine(key, True, (layer_wise,))
    switch = f"{theirs}.use_precision_aware_optimizer"
    if not options.take(switch, False):
        return
    yield RecipeLine(f"{ours}.megatron.use_precision_aware_optimizer", True, (switch,))
    for name in ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        kind = options.take(f"{theirs}.{name}", "fp32")
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(kind, kind)
        yield RecipeLine(f"{ours}.megatron.{name}", dtype, (f"{theirs}.{name}",))


def _schedule(options: ForeignOptions, theirs: str, ours: str) -> Found:
    named = [f"{theirs}.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style")]
    given = [name for name in named if options.take(name, None) is not None]
    schedule = options.given[given[0]] if given else "constant"
    if schedule in SCHEDULES:
        yield RecipeLine(f"{ours}.schedule", schedule, tuple(given))
    else:
        advice = f"{ours}.schedule is one of {', '.join(SCHEDULES)}"
        yield Decision(given[0], schedule, advice)
    lr = options.take(f"{theirs}.lr", 1e-6)
    # A constant schedule never falls to it.
    falls = schedule != "constant"
    least = options.take(f"{theirs}.min_lr", 0.0) if falls else 0.0
    ratio = options.take(f"{theirs}.min_lr_ratio", 0.0) if falls else 0.0
    if least or ratio:
        sources = (f"{theirs}.min_lr",) if least else (f"{theirs}.min_lr_ratio",)
        yield RecipeLine(f"{ours}.min_lr", least or ratio * lr, sources)
    steps = options.take(f"{theirs}.lr_warmup_steps", -1)
    share = 0.0 if steps > 0 else options.take(f"{theirs}.lr_warmup_steps_ratio", 0.0)
    total = options.take("trainer.total_training_steps", 0)
    if steps > 0:
        yield RecipeLine(f"{ours}.warmup_steps", steps, (f"{theirs}.lr_warmup_steps",))
    elif share and total:
        yield RecipeLine(
            f"{ours}.warmup_steps", round(share * total), (f"{theirs}.lr_warmup_steps_ratio",)
        )
    elif share:
        advice = f"set {ours}.warmup_steps to this share of run.steps"
        yield Decision(f"{theirs}.lr_warmup_steps_ratio", share, advice)


def translate_step(options: ForeignOptions) -> Found:
    """Yield what a step takes: prompts, mini-batches, micro-batches."""
    prompts, sources = take_prompts(options)
    yield RecipeLine("rollout.prompts_per_step", prompts, sources)
    yield from passes(options, ACTOR, "train", 256)
    yield from _micro_batches(options)
    yield from _router_replay(options)


def _router_replay(options: ForeignOptions) -> Found:
    group = "megatron.router_replay" if is_megatron(options) else "router_replay"
    name = f"{ACTOR}.{group}.mode"
    mode = options.take(name, options.take(f"{ACTOR}.router_replay.mode", "disabled"))
    reported = f"{ROLLOUT}.enable_rollout_routing_replay"
    if options.take(reported, False) or mode == "R3":
        yield RecipeLine("train.router_replay", "engine", (name, reported))
    elif mode == "R2":
        yield RecipeLine("train.router_replay", "old_pass", (name,))
    elif mode != "disabled":
        yield Decision(name, mode, "train.router_replay has none, old_pass and engine")


def passes(options: ForeignOptions, theirs: str, ours: str, mini_batch: int) -> Found:
    """Yield optimizer steps and passes of a rollout; `mini_batch` is verl's default, in prompts."""
    name = f"{theirs}.ppo_mini_batch_size"
    size = options.take(name, mini_batch)
    prompts, sources = take_prompts(options)
    yield RecipeLine(f"{ours}.mini_batches", max(round(prompts / size), 1), (*sources, name))
    if prompts % size:
        advice = f"does not divide the {prompts} prompts of a step: {ours}.mini_batches is rounded"
        yield Decision(name, size, advice)
    epochs = options.take(f"{theirs}.ppo_epochs", 1)
    yield RecipeLine(f"{ours}.epochs", epochs, (f"{theirs}.ppo_epochs",))


USUAL_TOKENS = 16384  # verl's default of ppo_max_token_len_per_gpu


def _micro_batches(options: ForeignOptions) -> Found:
    name = "train.max_tokens_per_microbatch"
    longest = take_shared(options, "data.max_prompt_length")
    longest += take_shared(options, "data.max_response_length")
    group = f"{ACTOR}.megatron.context_parallel_size"
    cp = options.take(
        group if is_megatron(options) else f"{ACTOR}.ulysses_sequence_parallel_size", 1
    )
    if options.take(f"{ACTOR}.use_dynamic_bsz", False):
        source = f"{ACTOR}.ppo_max_token_len_per_gpu"
        # verl multiplies by the ranks that share a sequence, too.
        sources = (source, f"{ACTOR}.use_dynamic_bsz")
        yield from hold_longest(name, options.take(source, USUAL_TOKENS) * cp, longest, sources)
    elif per_gpu := options.take(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0):
        # So many sequences of the greatest length are rare, and no result depends on the bound.
        tokens = max(min(per_gpu * longest, USUAL_TOKENS), longest)
        yield RecipeLine(name, tokens, (f"{ACTOR}.ppo_micro_batch_size_per_gpu",))
    else:
        yield RecipeLine(name, longest)
        advice = f"{name} is a single sequence of the greatest length: raise it by `mcore-rl plan`"
        yield Decision(f"{ACTOR}.ppo_micro_batch_size_per_gpu", None, advice)


TURNS = f"{ROLLOUT}.multi_turn"


def translate_engines(options: ForeignOptions) -> Found:
    """Yield how many engines there are, where, and what each is made of."""
    replicas = f"{ROLLOUT}.data_parallel_size"
    dp = options.take(replicas, 1)
    sizes = {}
    for ours, (theirs, default) in {
        "tp": ("tensor_model_parallel_size", 2),
        "pp": ("pipeline_model_parallel_size", 1),
        "ep": ("expert_parallel_size", 1),
    }.items():
        sizes[ours] = options.take(f"{ROLLOUT}.{theirs}", default)
        sources = (f"{ROLLOUT}.{theirs}",)
        if ours == "tp" and dp > 1:  # replicas of attention share the experts of one engine
            sizes[ours] *= dp
            sources = (*sources, replicas)
            yield RecipeLine("rollout.attention_dp", dp, (replicas,))
        if sizes[ours] > 1:
            yield RecipeLine(f"rollout.{ours}", sizes[ours], sources)
    yield from translate_placement(options, sizes["tp"] * sizes["pp"])
    share = options.take(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
    yield Decision(
        f"{ROLLOUT}.gpu_memory_utilization",
        share,
        "set rollout.kv_cache_len, in tokens per engine, by what `mcore-rl plan` says is free",
    )
    requests = options.take(f"{ROLLOUT}.max_num_seqs", 256)
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


def translate_sampling(options: ForeignOptions) -> Found:
    samples = options.take(f"{ROLLOUT}.n", 1)
    yield RecipeLine("rollout.samples_per_prompt", samples, (f"{ROLLOUT}.n",))
    longest = take_shared(options, "data.max_response_length")
    yield RecipeLine("rollout.max_response_len", longest, ("data.max_response_length",))
    for name, default in {"temperature": 1.0, "top_p": 1.0, "top_k": -1}.items():
        value = options.take(f"{ROLLOUT}.{name}", default)
        if value != default:
            yield RecipeLine(f"rollout.{name}", value, (f"{ROLLOUT}.{name}",))
    yield from _evaluation(options)
    if options.take(f"{ROLLOUT}.full_determinism", False):
        yield RecipeLine("rollout.deterministic", True, (f"{ROLLOUT}.full_determinism",))
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
    names = (f"{TURNS}.function_tool_path", "data.function_tool_path")
    functions = [name for name in names if options.take(name, None) is not None]
    if functions:
        advice = "make the functions methods of an environment (docs/agents.md)"
        yield Decision(functions[0], options.given[functions[0]], advice)
    elif tools is None and interaction is None:
        advice = "neither tools nor an interaction are given: set agents.environment"
        yield Decision(f"{TURNS}.enable", True, advice)
    if tools is not None and interaction is not None:
        advice = "an episode has one environment: give the tools to the interaction's class"
        yield Decision(f"{TURNS}.tool_config_path", tools, advice)
    turns = options.take(f"{TURNS}.max_assistant_turns", None)
    if turns is not None and tools is None and interaction is None:
        advice = "set agents.max_turns together with agents.environment"
        yield Decision(f"{TURNS}.max_assistant_turns", turns, advice)
    elif turns is not None:
        yield RecipeLine("agents.max_turns", turns, (f"{TURNS}.max_assistant_turns",))
    for name in ("max_user_turns", "max_parallel_calls", "max_tool_response_length"):
        value = options.take(f"{TURNS}.{name}", None)
        if value is not None and not options.is_whole:
            advice = "see the environment's own options, agents.options.* (docs/agents.md)"
            yield Decision(f"{TURNS}.{name}", value, advice)
