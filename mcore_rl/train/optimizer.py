"""Wraps model chunks in Megatron's DDP, and makes the optimizer and learning-rate schedule."""

from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from mcore_rl.config import OptimizerConfig
from mcore_rl.train.optimizer_state import write_whole_parameters
from mcore_rl.weights.models.tower import PREFIX

DDP_DEFAULTS: Mapping[str, Any] = {
    "grad_reduce_in_fp32": True,
    "use_distributed_optimizer": True,
    "check_for_nan_in_grad": True,
}
_DTYPE_FIELDS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")


class ModelPrecision(Float16Module):
    """A Float16Module whose logits keep the model's precision: float32 ones take twice the memory.

    train/logprobs.py makes float32 copies of a few tokens at a time.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output as it is."""
        return super().forward(*inputs, fp32_output=False, **kwargs)


def wrap_chunks(
    config: TransformerConfig, chunks: Sequence[torch.nn.Module], ddp: Mapping[str, Any]
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP; its parameters become views of DDP's buffers.

    `ddp`: further fields of DistributedDataParallelConfig. With overlap_grad_reduce, a bucket of
    gradients is reduced while the last micro-batch's backward pass still computes others.
    """
    ddp_config = DistributedDataParallelConfig(**{**DDP_DEFAULTS, **ddp})
    config.finalize_model_grads_func = finalize_model_grads
    inner = [ModelPrecision(config, c) for c in chunks] if config.bf16 else chunks
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)  # type: ignore[arg-type]
        for i, chunk in enumerate(inner)
    ]
    if ddp_config.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]  # type: ignore[assignment]
    return wrapped


def make_optimizer(
    config: OptimizerConfig, dtype: torch.dtype, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Return the distributed Adam: float32 main weights, decoupled decay, global norm clipping.

    Its moments are allocated at once, so a checkpoint can be saved before the first step.
    `config.megatron` holds further fields of megatron-core's OptimizerConfig.
    """
    dtypes = {
        name: getattr(torch, config.megatron[name])
        for name in _DTYPE_FIELDS
        if name in config.megatron
    }
    options = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        # The remainders of float32 weights would be all that a checkpoint holds of them.
        store_param_remainders=False,
        **{**config.megatron, **dtypes},
    )
    optimizer = get_megatron_optimizer(options, list(chunks), _overrides(config, options))
    for part in parts_of(optimizer):
        part.init_state_fn(part.optimizer, options)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
        write_whole_parameters(part)
    return optimizer


def _overrides(config: OptimizerConfig, options: MegatronOptimizerConfig) -> Any:
    """Return megatron-core's settings of groups of parameters; None for its standard ones.

    It tells the groups of a checkpoint apart by `lr_mult`, among others.
    """
    if config.vision_lr is None:
        return None
    tower: Any = {"lr_mult": config.vision_lr / config.lr}
    return {**get_standard_config_overrides(options), ParamKey(name=f"*{PREFIX}*"): tower}


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the chained optimizers: one for dense and one for expert parameters, or just one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    It rises linearly to lr during the warm-up, then follows the schedule down to min_lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Set the rate of every parameter group, times the group's own factor."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
