"""Converts model, layout, optimizer, batches and engines of NeMo-RL 0.7 into options."""

from typing import Any

from mcore_rl.config.training import RECOMPUTABLE
from mcore_rl.config.upstream.fields import TRANSFORMER
from mcore_rl.tools.translate.stages import read_num_layers, translate_ends
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    hold_longest,
    is_field,
    list_differing,
    translate_renamed,
)

MEGATRON = "policy.megatron_cfg"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
SIZES_OF_DTENSOR = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}
COLOCATED = "policy.generation.colocated"
PLACES = ("cluster.num_nodes", "cluster.gpus_per_node")
ADAPTERS = "set train.lora.rank, alpha and targets by names of HuggingFace modules (docs/lora.md)"
VARIABLES = "set variables where the run is started"
PRECISIONS = ("bfloat16", "float32")
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    f"{MEGATRON}.peft.enabled": (False, ADAPTERS),
    "policy.dtensor_cfg.lora_cfg.enabled": (False, ADAPTERS),
    f"{MEGATRON}.mtp_num_layers": (
        0,
        "train.mtp_loss trains the layers that config.json names (docs/mtp.md)",
    ),
    f"{MEGATRON}.use_linear_ce_fusion_loss": (False, "log-probs are computed in chunks"),
    f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp": (
        False,
        "weight sync does not read the shards of Megatron FSDP",
    ),
    "policy.dequantize_base_checkpoint": (
        False,
        "`mcore-rl-ckpt dequantize` writes a model in bfloat16: set model.path to it",
    ),
    "policy.draft.enabled": (False, "engines guess with rollout.speculate"),
    "policy.quant_cfg": (None, "train.megatron.fp8 trains in FP8; rollout.quantization has fp8"),
    "policy.tokenizer.chat_template": (None, "put it into model.path, as chat_template.jinja"),
    "policy.tokenizer.chat_template_kwargs": (
        None,
        "change the template in model.path, or set agents.template",
    ),
    "checkpointing.pretrained_checkpoint.path": (
        None,
        "a run begins with model.path in HuggingFace's format: convert the checkpoint",
    ),
}


def is_ppo(options: ForeignOptions) -> bool:
    """Return whether the configuration is that of PPO, with a critic."""
    return any(name.startswith("ppo.") for name in options.given)


LOOPS = ("ppo", "sft", "dpo")
"""Groups of options that say which training loop it is; without one it is that of GRPO."""


def loop_of(options: ForeignOptions) -> str:
    """Return the name of the group of options of the training loop."""
    groups = {name.partition(".")[0] for name in options.given}
    return next((loop for loop in LOOPS if loop in groups), "grpo")


def is_megatron(options: ForeignOptions, role: str = "policy") -> bool:
    """Return whether Megatron trains, and not DTensor's FSDP."""
    own = any(name.startswith(f"{role}.megatron_cfg.") for name in options.given)
    return options.take(f"{role}.megatron_cfg.enabled", own and not options.is_whole)


def total_len(options: ForeignOptions) -> int:
    """Return the greatest number of tokens of prompt and response."""
    return options.take("policy.max_total_sequence_length", 512)


def trainer_gpus(options: ForeignOptions) -> tuple[int, int]:
    """Return (GPUs of the trainer, GPUs of engines that have their own)."""
    nodes = options.take(PLACES[0], 1)
    per_node = options.take(PLACES[1], 1)
    if options.take(f"{COLOCATED}.enabled", True):
        return nodes * per_node, 0
    own_nodes = options.take(f"{COLOCATED}.resources.num_nodes", None)
    own = options.take(f"{COLOCATED}.resources.gpus_per_node", None)
    engines = own_nodes * (own or per_node) if own_nodes and nodes > 1 else own or 0
    return max(nodes * per_node - engines, 1), engines


def translate_model(options: ForeignOptions) -> Found:
    path = options.take("policy.model_name", "")
    yield RecipeLine("model.path", path, ("policy.model_name",))
    tokenizer = options.take("policy.tokenizer.name", path)
    if tokenizer != path:
        yield Decision("policy.tokenizer.name", tokenizer, "the tokenizer is that of model.path")
    precision = options.take("policy.precision", "bfloat16")
    if precision in PRECISIONS:
        yield RecipeLine("model.dtype", precision, ("policy.precision",))
    else:
        yield Decision("policy.precision", precision, f"model.dtype is {' or '.join(PRECISIONS)}")
    for name, value in options.below("policy.hf_config_overrides.").items():
        advice = "the model is what its config.json says: change it in a copy of model.path"
        yield Decision(f"policy.hf_config_overrides.{name}", value, advice)
    yield from list_differing(options, WITHOUT_COUNTERPART)


def translate_layout(options: ForeignOptions, role: str, ours: str) -> Found:
    """Yield the parallel sizes of `role`, policy or value, as options under `ours`."""
    on_megatron = is_megatron(options, role)
    group = f"{role}.{'megatron_cfg' if on_megatron else 'dtensor_cfg'}"
    table = SIZES if on_megatron else SIZES_OF_DTENSOR
    sizes = {name: options.take(f"{group}.{theirs}", 1) for name, theirs in table.items()}
    gpus, own = trainer_gpus(options)
    sources = (*PLACES, *([f"{COLOCATED}.resources.num_nodes"] if own else []))
    sources = (*sources, f"{role}.megatron_cfg.enabled") if on_megatron else sources
    ranks = sizes["tp"] * sizes.get("pp", 1) * sizes["cp"]
    yield RecipeLine(f"{ours}.dp", max(gpus // ranks, 1), sources)
    for name, theirs in table.items():
        if sizes[name] != 1:
            yield RecipeLine(f"{ours}.{name}", sizes[name], (f"{group}.{theirs}",))
    if not on_megatron:
        advice = f"Megatron trains here: choose {ours}.tp, pp and ep by `mcore-rl plan`"
        yield Decision(f"{role}.megatron_cfg.enabled", False, advice)
    names = [f"{role}.megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    ends = {name: options.take(name, None) for name in names}
    layers = read_num_layers(options.take(f"{role}.model_name", ""))
    yield from translate_ends(ours, sizes.get("pp", 1), ends, layers, ())


def translate_training(options: ForeignOptions) -> Found:
    """Yield what Megatron computes again, and the fields that are handed on to it."""
    if not is_megatron(options):
        name = "policy.dtensor_cfg.activation_checkpointing"
        if options.take(name, False):
            yield RecipeLine("train.recompute", "full", (name,))
        if options.take("policy.dtensor_cfg.cpu_offload", False):
            advice = "cluster.offload frees the GPU while engines use it"
            yield Decision("policy.dtensor_cfg.cpu_offload", True, advice)
        return
    yield from _recompute(options)
    is_frozen = options.take(f"{MEGATRON}.freeze_moe_router", False)
    if is_frozen:
        yield RecipeLine("train.freeze_router", True, (f"{MEGATRON}.freeze_moe_router",))
    rate = f"{MEGATRON}.moe_router_bias_update_rate"
    if options.take(rate, 0.0) and is_frozen:
        advice = "train.freeze_router keeps the router's bias, too: set one of them"
        yield Decision(rate, options.given[rate], advice)
    elif options.take(rate, 0.0):
        yield RecipeLine("train.router_bias_rate", options.given[rate], (rate,))
    kind = options.take(f"{MEGATRON}.moe_router_load_balancing_type", "none")
    if kind != "none":
        advice = "set train.router_aux_loss_coef or train.router_sequence_aux_loss_coef"
        yield Decision(f"{MEGATRON}.moe_router_load_balancing_type", kind, advice)
    for name, value in options.below(f"{MEGATRON}.env_vars.").items():
        yield Decision(f"{MEGATRON}.env_vars.{name}", value, VARIABLES)
    if options.take(f"{MEGATRON}.fp8_cfg.enabled", False):
        for name, default in (("fp8", "e4m3"), ("fp8_recipe", "blockwise")):
            source = f"{MEGATRON}.fp8_cfg.{name}"
            value = options.take(source, default)
            switch = f"{MEGATRON}.fp8_cfg.enabled"
            yield RecipeLine(f"train.megatron.{name}", value, (source, switch))
    yield from _translate_passed(options)


def _translate_passed(options: ForeignOptions) -> Found:
    flex = options.take(f"{MEGATRON}.moe_enable_deepep", False)
    if flex:
        name = f"{MEGATRON}.moe_enable_deepep"
        yield RecipeLine("train.megatron.moe_flex_dispatcher_backend", "deepep", (name,))
    for name in ("grad_reduce_in_fp32", "overlap_grad_reduce"):
        source = f"{MEGATRON}.distributed_data_parallel_config.{name}"
        yield from translate_renamed(options, {source: (f"train.ddp.{name}", None)})
    for name, value in options.given.items():
        field = name.removeprefix(f"{MEGATRON}.")
        if field == name or value is None or name in options.read or field in OWN_FIELDS:
            continue
        if is_field(TRANSFORMER, field):
            options.read.add(name)
            yield RecipeLine(f"train.megatron.{field}", value, (name,))


OWN_FIELDS = frozenset(
    {
        *("pipeline_dtype", "sequence_parallel", "moe_per_layer_logging", "moe_grouped_gemm"),
        *("mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
        *("recompute_granularity", "recompute_modules"),
    }
)
"""Fields of the transformer's configuration that a recipe does without."""


def _recompute(options: ForeignOptions) -> Found:
    names = ("activation_checkpointing", "recompute_granularity", "recompute_modules")
    sources = tuple(f"{MEGATRON}.{name}" for name in names)
    if not options.take(sources[0], False):
        return
    if options.take(sources[1], "full") == "full":
        yield RecipeLine("train.recompute", "full", sources[:2])
        return
    modules = options.take_list(sources[2], ["core_attn"])
    known = [module for module in modules if module in RECOMPUTABLE]
    yield RecipeLine("train.recompute", "+".join(known) or "none", sources)
    for module in set(modules) - set(known):
        yield Decision(sources[2], module, "recomputed by no recipe")


def translate_batches(options: ForeignOptions, role: str, ours: str) -> Found:
    """Yield the mini-batches of `role`, policy or value, as options under `ours`."""
    loop = loop_of(options)
    names = (f"{loop}.num_prompts_per_step", f"{loop}.num_generations_per_prompt")
    samples = options.take(names[0], 32) * options.take(names[1], 16)
    size_name = f"{role}.train_global_batch_size"
    size = options.take(size_name, 512)
    sources = (*names, size_name)
    yield RecipeLine(f"{ours}.mini_batches", max(round(samples / size), 1), sources)
    if samples % size:
        advice = f"does not divide the {samples} samples of a step: {ours}.mini_batches is rounded"
        yield Decision(size_name, size, advice)
    if is_ppo(options):
        yield RecipeLine(f"{ours}.epochs", options.take("ppo.ppo_epochs", 1), ("ppo.ppo_epochs",))


def translate_micro_batches(options: ForeignOptions) -> Found:
    ours = "train.max_tokens_per_microbatch"
    number = options.take("policy.train_micro_batch_size", 4)
    longest = total_len(options)
    names = ("policy.train_micro_batch_size", "policy.max_total_sequence_length")
    for group, default in (("sequence_packing", True), ("dynamic_batching", False)):
        if options.take(f"policy.{group}.enabled", default):
            source = f"policy.{group}.train_mb_tokens"
            tokens = options.take(source, number * longest)
            sources = (source, f"policy.{group}.enabled", *names)
            yield from hold_longest(ours, tokens, longest, sources)
            break
    else:
        yield RecipeLine(ours, number * longest, names)
    yield from translate_renamed(
        options, {"policy.logprob_chunk_size": ("train.logprob_chunk", None)}
    )
    if options.take("policy.router_replay.enabled", False):
        yield RecipeLine("train.router_replay", "engine", ("policy.router_replay.enabled",))


GENERATION = "policy.generation"
ENGINE_SIZES = {
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
    "trtllm": {"tp": "trtllm_cfg.tensor_parallel_size"},
}
SHARES = {
    "vllm": f"{GENERATION}.vllm_cfg.gpu_memory_utilization",
    "sglang": f"{GENERATION}.sglang_cfg.mem_fraction_static",
    "megatron": f"{GENERATION}.mcore_generation_config.buffer_size_gb",
    "trtllm": f"{GENERATION}.trtllm_cfg.gpu_memory_utilization",
}
"""Options that say how much memory an engine's KV cache has."""
SGLANG = f"{GENERATION}.sglang_cfg"
CONCURRENCY = f"{SGLANG}.sglang_server_config.sglang_server_concurrency"
ENGINES_RUN = "a recipe starts its own engines and balances requests among them"
GENERATION_WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
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
    if backend not in ENGINE_SIZES:
        yield Decision(f"{GENERATION}.backend", backend, "SGLang samples: set rollout.tp")
    table = {
        ours: f"{GENERATION}.{theirs}" for ours, theirs in ENGINE_SIZES.get(backend, {}).items()
    }
    sizes = {ours: options.take(theirs, 1) for ours, theirs in table.items()}
    sources = {ours: (theirs,) for ours, theirs in table.items()}
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    if ep > tp and ep % tp == 0 and "attention_dp" not in table:
        # Replicas of attention share the experts; an engine here counts them among its ranks.
        sizes |= {"tp": ep, "attention_dp": ep // tp}
        sources |= dict.fromkeys(("tp", "attention_dp"), (table["tp"], table["ep"]))
    for ours, size in sizes.items():
        if size > 1:
            yield RecipeLine(f"rollout.{ours}", size, sources[ours])
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1)
    yield from _placement(options, ranks, tuple(table.values()))
    advice = "set rollout.kv_cache_len, in tokens per engine, by what `mcore-rl plan` says is free"
    share = SHARES.get(backend, SHARES["vllm"])
    yield Decision(share, options.take(share, None), advice)
    yield from _precision(options)
    yield from _translate_engine_options(options)
    yield from list_differing(options, GENERATION_WITHOUT_COUNTERPART)


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


def _translate_engine_options(options: ForeignOptions) -> Found:
    yield from translate_renamed(options, {CONCURRENCY: ("rollout.max_concurrency", None)})
    for name, value in options.below(f"{GENERATION}.vllm_cfg.env_vars.").items():
        yield Decision(f"{GENERATION}.vllm_cfg.env_vars.{name}", value, VARIABLES)
    for name, value in options.below(f"{GENERATION}.vllm_kwargs.").items():
        advice = "SGLang samples: rollout.sglang has its options (docs/upstream_options.md)"
        yield Decision(f"{GENERATION}.vllm_kwargs.{name}", value, advice)
    left = options.list_left()
    for name in [name for name in left if name.startswith(f"{SGLANG}.")]:
        field = name.removeprefix(f"{SGLANG}.")
        if "." not in field and field not in GENERATION_FIELDS:
            options.read.add(name)
            yield RecipeLine(f"rollout.sglang.{field}", left[name], (name,))


GENERATION_FIELDS = frozenset(
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
    yield from translate_renamed(options, table)
    yield from _asynchronous(options)
    yield from _dynamic(options, loop)
    turns = options.take(f"{loop}.max_rollout_turns", 1)
    if turns > 1:
        advice = "set agents.max_turns together with agents.environment (docs/agents.md)"
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
    loop = loop_of(options)
    group = f"{loop}.async_{loop}"
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
    yield from translate_renamed(options, table)
