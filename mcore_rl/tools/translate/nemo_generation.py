"""Engines and sampling of NeMo-RL 0.7, as options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.nemo_policy import (
    COLOCATED,
    PLACES,
    VARIABLES,
    loop_of,
    total_len,
    trainer_gpus,
)
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    differing,
    renamed,
)

GENERATION = "policy.generation"
SIZES = {
    "vllm": {
        "tp": "vllm_cfg.tensor_parallel_size",
        "pp": "vllm_cfg.pipeline_parallel_size",
        "ep": "vllm_cfg.expert_parallel_size",
    },
    "sglang": {
        "tp": "sglang_cfg.tp_size",
        "pp": "sglang_cfg.pp_size",
        "ep": "sglang_cfg.ep_size",
        "attention_dp": "sglang_cfg.dp_size",
    },
    "megatron": {
        "tp": "mcore_generation_config.tensor_model_parallel_size",
        "pp": "mcore_generation_config.pipeline_model_parallel_size",
        "ep": "mcore_generation_config.expert_model_parallel_size",
    },
}
SHARES = {
    "vllm": f"{GENERATION}.vllm_cfg.gpu_memory_utilization",
    "sglang": f"{GENERATION}.sglang_cfg.mem_fraction_static",
    "megatron": f"{GENERATION}.mcore_generation_config.buffer_size_gb",
}
"""Options that say how much memory an engine's KV cache has."""
SGLANG = f"{GENERATION}.sglang_cfg"
CONCURRENCY = f"{SGLANG}.sglang_server_config.sglang_server_concurrency"
ENGINES_RUN = "a recipe starts its own engines and balances requests among them"
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    f"{GENERATION}.stop_token_ids": (
        None,
        "list them in generation_config.json of model.path, as eos_token_id",
    ),
    f"{GENERATION}.stop_strings": (None, "a response ends with its stop token"),
    f"{GENERATION}.bad_words": (None, "all tokens may be sampled"),
    f"{GENERATION}.quant_cfg": (None, "rollout.quantization has none and fp8"),
    f"{GENERATION}.vllm_cfg.expose_http_server": (False, "see docs/agents.md for servers"),
    f"{SGLANG}.sglang_router_config.use_external_router": (False, ENGINES_RUN),
}


def translate_engines(options: ForeignOptions) -> Found:
    """Yield how many engines there are, where, and what each is made of."""
    backend = options.take(f"{GENERATION}.backend", "vllm")
    if backend not in SIZES:
        yield Decision(f"{GENERATION}.backend", backend, "SGLang samples: set rollout.tp")
    table = {ours: f"{GENERATION}.{theirs}" for ours, theirs in SIZES.get(backend, {}).items()}
    sizes = {ours: options.take(theirs, 1) for ours, theirs in table.items()}
    for ours, size in sizes.items():
        if size > 1:
            yield RecipeLine(f"rollout.{ours}", size, (table[ours],))
    ranks = max(sizes.get("tp", 1), sizes.get("ep", 1)) * sizes.get("pp", 1)
    if sizes.get("ep", 1) > sizes.get("tp", 1):
        # Engines here have no more expert-parallel than tensor-parallel ranks.
        advice = f"its ranks share the experts only: set rollout.tp={sizes['ep']} and"
        advice += f" rollout.attention_dp={sizes['ep'] // sizes['tp']}"
        yield Decision(table["ep"], sizes["ep"], advice)
    yield from _placement(options, ranks, tuple(table.values()))
    advice = "set rollout.kv_cache_len, in tokens per engine, by what `mcore-rl plan` says is free"
    share = SHARES.get(backend, SHARES["vllm"])
    yield Decision(share, options.take(share, None), advice)
    yield from _precision(options)
    yield from _of_engines(options)
    yield from differing(options, WITHOUT_COUNTERPART)


def _placement(options: ForeignOptions, ranks: int, names: tuple[str, ...]) -> Found:
    shared, own = trainer_gpus(options)
    nodes = options.take(PLACES[0], 1)
    if options.take(f"{COLOCATED}.enabled", True):
        yield RecipeLine("rollout.engines", max(shared // ranks, 1), (*PLACES, *names))
        yield RecipeLine("cluster.colocated", True, (f"{COLOCATED}.enabled",))
        yield RecipeLine("cluster.offload", True, (f"{COLOCATED}.enabled",))
        # A recipe with engines on the trainer's GPUs has to have these.
        yield RecipeLine("rollout.stage_weights", False)
        yield RecipeLine("rollout.restarts", 0)
    else:
        resources = tuple(f"{COLOCATED}.resources.{n}" for n in ("num_nodes", "gpus_per_node"))
        sources = (f"{COLOCATED}.enabled", *resources, *names)
        yield RecipeLine("rollout.engines", max(own // ranks, 1), sources)
    if nodes > 1:
        advice = "`mcore-rl submit` finds it from the ranks of the recipe (docs/launch.md); on a"
        advice += " Ray of your own set cluster.address and cluster.num_nodes"
        yield Decision(PLACES[0], nodes, advice)


def _precision(options: ForeignOptions) -> Found:
    name = f"{GENERATION}.vllm_cfg.precision"
    kind = options.take(name, "bfloat16")
    if kind == "fp8":
        yield RecipeLine("rollout.quantization", "fp8", (name,))
    elif kind not in ("bfloat16", options.take("policy.precision", "bfloat16")):
        yield Decision(name, kind, "engines have model.dtype; rollout.quantization has fp8")
    cache = f"{GENERATION}.vllm_cfg.kv_cache_dtype"
    kind = options.take(cache, "auto")
    if kind != "auto":
        value = "fp8_e4m3" if kind == "fp8" else kind
        yield RecipeLine("rollout.sglang.kv_cache_dtype", value, (cache,))


def _of_engines(options: ForeignOptions) -> Found:
    yield from renamed(options, {CONCURRENCY: ("rollout.max_concurrency", None)})
    for name, value in options.below(f"{GENERATION}.vllm_cfg.env_vars.").items():
        yield Decision(f"{GENERATION}.vllm_cfg.env_vars.{name}", value, VARIABLES)
    for name, value in options.below(f"{GENERATION}.vllm_kwargs.").items():
        advice = "SGLang samples: rollout.sglang has its options (docs/upstream_options.md)"
        yield Decision(f"{GENERATION}.vllm_kwargs.{name}", value, advice)
    left = options.left()
    for name in [name for name in left if name.startswith(f"{SGLANG}.")]:
        field = name.removeprefix(f"{SGLANG}.")
        if "." not in field and field not in OWN_FIELDS:
            options.read.add(name)
            yield RecipeLine(f"rollout.sglang.{field}", left[name], (name,))


OWN_FIELDS = frozenset(
    {
        *("model_path", "dtype", "context_length", "random_seed", "skip_server_warmup"),
        *("max_running_requests", "allow_auto_truncate"),
    }
)
"""Fields of SGLang's options that a recipe does without."""


def translate_sampling(options: ForeignOptions) -> Found:
    loop = loop_of(options)
    yield from _lengths(options)
    table: dict[str, tuple[str, Any]] = {
        f"{loop}.num_prompts_per_step": ("rollout.prompts_per_step", 32),
        f"{loop}.num_generations_per_prompt": ("rollout.samples_per_prompt", 16),
        f"{GENERATION}.temperature": ("rollout.temperature", None),
        f"{GENERATION}.top_p": ("rollout.top_p", None),
        f"{GENERATION}.top_k": ("rollout.top_k", None),
    }
    yield from renamed(options, table)
    yield from _asynchronous(options)
    yield from _dynamic(options, loop)
    turns = options.take(f"{loop}.max_rollout_turns", 1)
    if turns > 1:
        yield RecipeLine("agents.max_turns", turns, (f"{loop}.max_rollout_turns",))
        advice = "set agents.environment (docs/agents.md)"
        yield Decision(f"{loop}.max_rollout_turns", turns, advice)


def _lengths(options: ForeignOptions) -> Found:
    """Yield bounds of prompts and of responses, which have one together in NeMo-RL."""
    total = total_len(options)
    names = ("data.max_input_seq_length", f"{GENERATION}.max_new_tokens")
    source = "policy.max_total_sequence_length"
    prompt, answer = (min(options.take(name, total), total) for name in names)
    if prompt + answer > total:
        if prompt < total:
            answer = total - prompt
        else:
            prompt = total - answer if answer < total else total // 2
            answer = total - prompt
        advice = "there prompt and response have these tokens together: divide them by your data"
        advice += " among data.max_prompt_len and rollout.max_response_len"
        yield Decision(source, total, advice)
    yield RecipeLine("data.max_prompt_len", prompt, (names[0], source))
    yield RecipeLine("rollout.max_response_len", answer, (names[1], source))


def _asynchronous(options: ForeignOptions) -> Found:
    group = "grpo.async_grpo"
    if not options.take(f"{group}.enabled", False):
        return
    if options.take(f"{COLOCATED}.enabled", True):
        advice = "engines on the trainer's GPUs take turns with it: rollout.mode is sync"
        yield Decision(f"{group}.enabled", True, advice)
        return
    yield RecipeLine("rollout.mode", "async", (f"{group}.enabled",))
    age = f"{group}.max_trajectory_age_steps"
    yield RecipeLine("rollout.max_staleness", options.take(age, 1), (age,))
    flying = f"{group}.in_flight_weight_updates"
    partial = "continue" if options.take(flying, False) else "wait"
    yield RecipeLine("rollout.partial", partial, (flying,))


def _dynamic(options: ForeignOptions, loop: str) -> Found:
    if not options.take(f"{loop}.use_dynamic_sampling", False):
        return
    yield RecipeLine("rollout.dynamic_sampling", True, (f"{loop}.use_dynamic_sampling",))
    table: dict[str, tuple[str, Any]] = {
        f"{loop}.dynamic_sampling_max_gen_batches": ("rollout.max_rounds", 10),
        f"{loop}.batch_multiplier": ("rollout.oversampling", 1),
    }
    yield from renamed(options, table)
