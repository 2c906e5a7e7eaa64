"""Model, layout, optimizer and batches of NeMo-RL 0.7, as options of a recipe."""

from typing import Any

from mcore_rl.config.training import RECOMPUTABLE
from mcore_rl.config.upstream.fields import TRANSFORMER
from mcore_rl.tools.translate.megatron_flags import is_field
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    differing,
    renamed,
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
NO_ADAPTERS = "there are no adapters: all weights are trained and synced; a learning rate that"
NO_ADAPTERS += " suits adapters is too high"
VARIABLES = "set variables where the run is started"
PRECISIONS = ("bfloat16", "float32")
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    f"{MEGATRON}.peft.enabled": (False, NO_ADAPTERS),
    "policy.dtensor_cfg.lora_cfg.enabled": (False, NO_ADAPTERS),
    f"{MEGATRON}.mtp_num_layers": (0, "layers that predict several tokens are not trained"),
    f"{MEGATRON}.use_linear_ce_fusion_loss": (False, "log-probs are computed in chunks"),
    f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp": (
        False,
        "weight sync does not read the shards of Megatron FSDP",
    ),
    "policy.draft.enabled": (False, "engines guess with rollout.sglang.speculative_algorithm"),
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


def loop_of(options: ForeignOptions) -> str:
    """Return the name of the group of options of the training loop."""
    return "ppo" if is_ppo(options) else "grpo"


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
    yield from differing(options, WITHOUT_COUNTERPART)


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
    for end in ("first", "last"):
        name = f"{role}.megatron_cfg.num_layers_in_{end}_pipeline_stage"
        layers = options.take(name, None)
        if layers is not None:
            yield Decision(name, layers, f"set {ours}.stage_layers, the layers of each stage")


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
    if options.take(f"{MEGATRON}.freeze_moe_router", False):
        yield RecipeLine("train.freeze_router", True, (f"{MEGATRON}.freeze_moe_router",))
    rate = f"{MEGATRON}.moe_router_bias_update_rate"
    if options.take(rate, 0.0):
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
    yield from _passed(options)


def _passed(options: ForeignOptions) -> Found:
    flex = options.take(f"{MEGATRON}.moe_enable_deepep", False)
    if flex:
        name = f"{MEGATRON}.moe_enable_deepep"
        yield RecipeLine("train.megatron.moe_flex_dispatcher_backend", "deepep", (name,))
    for name in ("grad_reduce_in_fp32", "overlap_grad_reduce"):
        source = f"{MEGATRON}.distributed_data_parallel_config.{name}"
        yield from renamed(options, {source: (f"train.ddp.{name}", None)})
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
            yield RecipeLine(ours, tokens, (source, f"policy.{group}.enabled", *names))
            break
    else:
        yield RecipeLine(ours, number * longest, names)
    yield from renamed(options, {"policy.logprob_chunk_size": ("train.logprob_chunk", None)})
    if options.take("policy.router_replay.enabled", False):
        yield RecipeLine("train.router_replay", "engine", ("policy.router_replay.enabled",))
