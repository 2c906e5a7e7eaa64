"""Checks the groups of options that go to upstream classes, against upstream and other groups."""

from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.training import OptimizerConfig, TrainConfig, UpdatesConfig
from mcore_rl.config.tree import spell
from mcore_rl.config.upstream import (
    TO_DDP,
    TO_ENGINES,
    TO_OPTIMIZER,
    TO_TRANSFORMER,
    Passed,
    check_passed,
)
from mcore_rl.config.upstream.owned import READ_WITH_FULL


def check_training(group: str, parallel: str, options: UpdatesConfig, policy: TrainConfig) -> None:
    """Raise ValueError naming the first option for Megatron of `group` that is wrong or unread.

    parallel    dotted name of the group of the model's parallel sizes
    policy      the policy's options, which the critic's come on top of
    """
    owners = {"parallel": parallel, "optimizer": f"{group}.optimizer"}
    check_passed(f"{group}.megatron", options.megatron, TO_TRANSFORMER, owners)
    check_passed(f"{group}.ddp", options.ddp, TO_DDP, owners)
    _check_recompute(f"{group}.megatron", options.megatron, policy.recompute)
    _check_experts(f"{group}.megatron", {**policy.megatron, **options.megatron})


def check_optimizer(group: str, optimizer: OptimizerConfig) -> None:
    """Raise ValueError naming the first option for Megatron's optimizer that is wrong or unread."""
    options = optimizer.megatron
    check_passed(f"{group}.megatron", options, TO_OPTIMIZER, {"optimizer": group})
    _check_moments(f"{group}.megatron", options)
    _check_muon(group, optimizer)
    _check_lion(group, optimizer)


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


def _check_muon(group: str, optimizer: OptimizerConfig) -> None:
    options = optimizer.megatron
    if optimizer.name != "muon":
        for name in options:
            if name.startswith("muon_"):
                raise ValueError(
                    f"{group}.megatron.{name}={options[name]} with {group}.name={optimizer.name}:"
                    f" only Muon reads it; set {group}.name=muon, or leave it out"
                )
        return
    if options.get("use_precision_aware_optimizer"):
        raise ValueError(
            f"{group}.megatron.use_precision_aware_optimizer=true with {group}.name=muon: main"
            " weights lie inside Adam then, where Muon cannot update them; set it, exp_avg_dtype"
            " and exp_avg_sq_dtype there to null"
        )
    if options.get("muon_num_ns_steps", 5) < 1:
        raise ValueError(
            f"{group}.megatron.muon_num_ns_steps={options['muon_num_ns_steps']}: Muon iterates at"
            " least once; raise it to 1 or more (5 is usual)"
        )


def _check_lion(group: str, optimizer: OptimizerConfig) -> None:
    if optimizer.name != "lion":
        return
    if optimizer.eps != OptimizerConfig.eps:
        raise ValueError(
            f"{group}.eps={optimizer.eps:g} with {group}.name=lion: Lion divides by nothing; leave"
            f" {group}.eps out"
        )
    if optimizer.megatron.get("use_precision_aware_optimizer"):
        raise ValueError(
            f"{group}.megatron.use_precision_aware_optimizer=true with {group}.name=lion: only Adam"
            " has it; set it, exp_avg_dtype and exp_avg_sq_dtype there to null"
        )


def check_engines(rollout: RolloutConfig) -> None:
    """Raise ValueError naming the first option for the policy's engines that is wrong or unread."""
    options = rollout.sglang
    check_passed("rollout.sglang", options, TO_ENGINES, {"engine": "rollout"})
    for name in ("enable_dp_lm_head", "moe_dense_tp_size"):
        if options.get(name) and rollout.attention_dp == 1:
            raise ValueError(
                f"rollout.sglang.{name}={spell(options[name])} with rollout.attention_dp=1: SGLang"
                " has it for DP attention only; raise rollout.attention_dp, or set"
                f" rollout.sglang.{name}=null"
            )
    if options.get("moe_a2a_backend") == "deepep" and rollout.ep != rollout.tp:
        raise ValueError(
            f"rollout.sglang.moe_a2a_backend=deepep with rollout.ep={rollout.ep}: DeepEP deals"
            f" experts out to all ranks of an engine; set rollout.ep={rollout.tp}"
        )
