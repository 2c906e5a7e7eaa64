"""The groups of a recipe whose options go to upstream classes, and their checks against others."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mcore_rl.config.tree import shown
from mcore_rl.config.upstream import (
    TO_DDP,
    TO_ENGINES,
    TO_OPTIMIZER,
    TO_SERVED,
    TO_TRANSFORMER,
    OpenGroup,
    Passed,
    check_passed,
)
from mcore_rl.config.upstream.owned_megatron import READ_WITH_FULL

if TYPE_CHECKING:
    from mcore_rl.config import Config

Group = tuple[str, Passed, OpenGroup, Mapping[str, str]]
"""(dotted name, options, kind, the owners that errors name)."""


def check_upstream(config: "Config") -> None:
    """Raise ValueError naming the first option for upstream that is wrong or of no effect."""
    for group, options, kind, owners in _groups(config):
        check_passed(group, options, kind, owners)
    for group, options in (("train", config.train.megatron), ("critic", config.critic.megatron)):
        _check_recompute(f"{group}.megatron", options, config.train.recompute)
        _check_experts(f"{group}.megatron", {**config.train.megatron, **options})
    for group, optimizer in config.optimizers.items():
        _check_moments(f"{group}.megatron", optimizer.megatron)
    _check_engines(config, config.rollout.sglang)


def _groups(config: "Config") -> Iterator[Group]:
    for train, parallel, passed in (
        ("train", "parallel", config.train),
        ("critic", "critic.parallel", config.critic),
    ):
        owners = {"parallel": parallel, "optimizer": f"{train}.optimizer"}
        yield f"{train}.megatron", passed.megatron, TO_TRANSFORMER, owners
        yield f"{train}.ddp", passed.ddp, TO_DDP, owners
    for optimizer, settings in config.optimizers.items():
        yield f"{optimizer}.megatron", settings.megatron, TO_OPTIMIZER, {"optimizer": optimizer}
    yield "rollout.sglang", config.rollout.sglang, TO_ENGINES, {"engine": "rollout"}
    for role, model in config.served_groups.items():
        yield f"{role}.sglang", model.sglang, TO_SERVED, {"engine": role}


def _check_recompute(group: str, options: Passed, recompute: str) -> None:
    for name in READ_WITH_FULL:
        if name in options and recompute != "full":
            raise ValueError(
                f"{group}.{name}={options[name]} with train.recompute={recompute}: megatron-core"
                " reads it only with train.recompute=full"
            )


def _check_experts(group: str, options: Passed) -> None:
    flex = options.get("moe_token_dispatcher_type") == "flex"
    if flex and options.get("moe_shared_expert_overlap"):
        raise ValueError(
            f"{group}.moe_shared_expert_overlap=true with moe_token_dispatcher_type=flex:"
            " megatron-core overlaps shared experts with the alltoall dispatcher only; leave one"
            " of them out"
        )
    backend = options.get("moe_flex_dispatcher_backend")
    if backend is not None and not flex:
        raise ValueError(
            f"{group}.moe_flex_dispatcher_backend={backend}: only the flex dispatcher reads it; set"
            f" {group}.moe_token_dispatcher_type=flex"
        )


def _check_moments(group: str, options: Passed) -> None:
    if options.get("use_precision_aware_optimizer"):
        return
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"):
        if options.get(name, "float32") != "float32":
            raise ValueError(
                f"{group}.{name}={options[name]}: only the precision-aware optimizer has moments"
                f" and gradients in other precisions; set"
                f" {group}.use_precision_aware_optimizer=true"
            )


def _check_engines(config: "Config", options: Passed) -> None:
    rollout = config.rollout
    for name in ("enable_dp_lm_head", "moe_dense_tp_size"):
        if options.get(name) and rollout.attention_dp == 1:
            raise ValueError(
                f"rollout.sglang.{name}={shown(options[name])} with rollout.attention_dp=1: SGLang"
                " has it for DP attention only; raise rollout.attention_dp, or set"
                f" rollout.sglang.{name}=null"
            )
    if options.get("moe_a2a_backend") == "deepep" and rollout.ep != rollout.tp:
        raise ValueError(
            f"rollout.sglang.moe_a2a_backend=deepep with rollout.ep={rollout.ep}: DeepEP deals"
            f" experts out to all ranks of an engine; set rollout.ep={rollout.tp}"
        )
    if not options.get("speculative_algorithm"):
        return
    conflicts: dict[str, tuple[Any, Any, str]] = {
        "rollout.attention_dp": (
            rollout.attention_dp,
            1,
            "SGLang guesses with n-grams only without DP attention",
        ),
        "rollout.deterministic": (
            rollout.deterministic,
            False,
            "guesses depend on what else the engine has decoded",
        ),
        "drift.routed_experts": (
            config.drift.routed_experts,
            False,
            "SGLang does not report the experts of tokens that were guessed",
        ),
    }
    for name, (value, needed, why) in conflicts.items():
        if value != needed:
            raise ValueError(
                f"rollout.sglang.speculative_algorithm={options['speculative_algorithm']} with"
                f" {name}={shown(value)}: {why}; set {name}={shown(needed)}"
            )
