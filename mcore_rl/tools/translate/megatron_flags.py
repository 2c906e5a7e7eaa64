"""Turns arguments of Megatron's and SGLang's command lines into options of a recipe.

Fields of their classes are handed on by their own names, as train.megatron.<field>.
"""

import ast
from collections.abc import Callable
from typing import Any

from mcore_rl.config.upstream.fields import (
    DDP,
    OPTIMIZER,
    SERVER,
    TRANSFORMER,
    UpstreamClass,
    is_installed,
    read_fields,
)
from mcore_rl.tools.translate.translation import Decision, ForeignOptions, Found, RecipeLine

GROUPS = (
    (TRANSFORMER, "train.megatron"),
    (OPTIMIZER, "train.optimizer.megatron"),
    (DDP, "train.ddp"),
)
SPELLED: dict[str, tuple[str, Any]] = {
    "accumulate_allreduce_grads_in_fp32": ("train.ddp.grad_reduce_in_fp32", True),
    "grad_reduce_in_bf16": ("train.ddp.grad_reduce_in_fp32", False),
    "no_check_for_nan_in_loss_and_grad": ("train.ddp.check_for_nan_in_grad", False),
    "no_rope_fusion": ("train.megatron.apply_rope_fusion", False),
    "no_bias_swiglu_fusion": ("train.megatron.bias_activation_fusion", False),
    "no_bias_gelu_fusion": ("train.megatron.bias_activation_fusion", False),
    "use_nccl_ub": ("train.ddp.nccl_ub", True),
    "use_torch_fsdp2": ("train.ddp.use_megatron_fsdp", True),
    "offload_optimizer_states": ("train.optimizer.megatron.optimizer_cpu_offload", True),
    "moe_router_force_biased": ("train.megatron.moe_router_force_load_balancing", True),
    "moe_enable_deepep": ("train.megatron.moe_flex_dispatcher_backend", "deepep"),
}
"""Flags that are not named as the field that they set, and its value."""
RENAMED = {
    "fp8_format": "train.megatron.fp8",
    "fp4_param_gather": "train.megatron.fp4_param",
    "microbatch_group_size_per_virtual_pipeline_stage": (
        "train.megatron.microbatch_group_size_per_vp_stage"
    ),
    "fp4_format": "train.megatron.fp4",
    "ddp_bucket_size": "train.ddp.bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "train.ddp.pad_buckets_for_high_nccl_busbw",
    "ddp_average_in_collective": "train.ddp.average_in_collective",
    "ddp_reduce_scatter_with_fp32_accumulation": (
        "train.ddp.reduce_scatter_with_fp32_accumulation"
    ),
    "moe_router_bias_update_rate": "train.router_bias_rate",
}


def translate_flags(options: ForeignOptions, reason_of: Callable[[str], str | None]) -> Found:
    """Yield the options that nobody has read, where they are fields of Megatron's or SGLang's.

    reason_of   name of an option -> why a recipe does without it; None: it does not
    """
    yield from _balance(options)
    for flag in list(options.list_left()):
        if reason_of(flag) is not None:
            continue
        value = options.given[flag]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--sglang-"):
            options.read.add(flag)
            yield _translate_engine_flag(name.removeprefix("sglang_"), value, flag)
            continue
        line = _translate_trainer_flag(name, value, flag)
        if line is not None:
            options.read.add(flag)
            yield line


def _balance(options: ForeignOptions) -> Found:
    """Yield the coefficients of the losses that balance experts, which are named by their kind."""
    kinds = options.take_list("--moe-router-load-balancing-type", ["aux_loss"])
    coefs: Any = options.take("--moe-aux-loss-coeff", 0.0)
    coefs = coefs if isinstance(coefs, list) else [coefs] * len(kinds)
    names = {"aux_loss": "router_aux_loss_coef", "seq_aux_loss": "router_sequence_aux_loss_coef"}
    sources = ("--moe-aux-loss-coeff", "--moe-router-load-balancing-type")
    if not options.given.keys() & set(sources):
        return
    for kind, coef in zip(kinds, coefs, strict=False):
        if kind in names:
            yield RecipeLine(f"train.{names[kind]}", coef, sources)
        elif kind != "none":
            advice = "experts are balanced by train.router_aux_loss_coef and"
            advice += " train.router_sequence_aux_loss_coef, or by train.router_bias_rate"
            yield Decision("--moe-router-load-balancing-type", kind, advice)


def _translate_engine_flag(name: str, value: Any, flag: str) -> RecipeLine:
    field = read_fields(SERVER).get(name) if is_installed(SERVER) else None
    is_list = field is not None and type_of(field.kind).startswith("List[")
    return RecipeLine(
        f"rollout.sglang.{name}",
        [value] if is_list and not isinstance(value, list) else value,
        (flag,),
    )


def type_of(kind: Any) -> str:
    text = ast.unparse(kind)
    return text.removeprefix("Optional[").replace("list[", "List[")


def _translate_trainer_flag(name: str, value: Any, flag: str) -> RecipeLine | None:
    if name in SPELLED:
        key, meant = SPELLED[name]
        return RecipeLine(key, meant, (flag,))
    if name in RENAMED:
        return RecipeLine(RENAMED[name], value, (flag,))
    negated = name.removeprefix("no_").removeprefix("disable_")
    for upstream, group in GROUPS:
        if is_field(upstream, name):
            return RecipeLine(f"{group}.{name}", value, (flag,))
        if negated != name and value is True and is_field(upstream, negated):
            return RecipeLine(f"{group}.{negated}", False, (flag,))
    return None


def is_field(upstream: UpstreamClass, name: str) -> bool:
    """Return whether the installed class has a field of this name."""
    return is_installed(upstream) and name in read_fields(upstream)
