"""Optimizers and schedules of NeMo-RL 0.7, as options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.foreign import Decision, ForeignOptions, Found, RecipeLine
from mcore_rl.tools.translate.nemo_policy import is_megatron
from mcore_rl.tools.translate.tables import differing, renamed

SCHEDULES = ("constant", "linear", "cosine")


def translate_optimizer(options: ForeignOptions, role: str, ours: str) -> Found:
    """Yield the optimizer of `role`, policy or value, as options under `ours`."""
    clip_name = f"{role}.max_grad_norm"
    clip = options.take(clip_name, 1.0)
    if not is_megatron(options, role):
        yield from _torch_optimizer(options, f"{role}.optimizer", ours)
        yield RecipeLine(f"{ours}.clip_grad", clip, (clip_name,))
        schedule = options.take(f"{role}.scheduler", None)
        if schedule is not None:
            advice = f"set {ours}.warmup_steps and {ours}.schedule, which is one of"
            yield Decision(f"{role}.scheduler", schedule, f"{advice} {', '.join(SCHEDULES)}")
        return
    theirs = f"{role}.megatron_cfg.optimizer"
    own_clip = options.take(f"{theirs}.clip_grad", clip)
    yield RecipeLine(f"{ours}.clip_grad", own_clip, (f"{theirs}.clip_grad", clip_name))
    table: dict[str, tuple[str, Any]] = {
        f"{theirs}.lr": (f"{ours}.lr", 5e-6),
        f"{theirs}.weight_decay": (f"{ours}.weight_decay", 0.01),
        f"{theirs}.adam_beta1": (f"{ours}.beta1", 0.9),
        f"{theirs}.adam_beta2": (f"{ours}.beta2", 0.999),
        f"{theirs}.adam_eps": (f"{ours}.eps", 1e-8),
        f"{theirs}.use_precision_aware_optimizer": (
            f"{ours}.megatron.use_precision_aware_optimizer",
            True,
        ),
    }
    yield from renamed(options, table)
    yield from differing(options, {f"{theirs}.optimizer": ("adam", "the optimizer is Adam")})
    name = f"{theirs}.optimizer_cpu_offload"
    if options.take(name, False):
        yield RecipeLine(f"{ours}.megatron.optimizer_cpu_offload", True, (name,))
    yield from _schedule(options, role, ours)


def _torch_optimizer(options: ForeignOptions, theirs: str, ours: str) -> Found:
    kwargs = f"{theirs}.kwargs"
    table: dict[str, tuple[str, Any]] = {
        f"{kwargs}.lr": (f"{ours}.lr", 5e-6),
        f"{kwargs}.weight_decay": (f"{ours}.weight_decay", 0.01),
        f"{kwargs}.eps": (f"{ours}.eps", 1e-8),
    }
    yield from renamed(options, table)
    for i, beta in enumerate(options.take(f"{kwargs}.betas", [0.9, 0.999]), 1):
        yield RecipeLine(f"{ours}.beta{i}", beta, (f"{kwargs}.betas",))
    kind = options.take(f"{theirs}.name", "torch.optim.AdamW")
    if not kind.endswith(("AdamW", "FusedAdam")):
        yield Decision(f"{theirs}.name", kind, "the optimizer is Adam")


def _schedule(options: ForeignOptions, role: str, ours: str) -> Found:
    theirs = f"{role}.megatron_cfg.scheduler"
    style = options.take(f"{theirs}.lr_decay_style", "constant")
    if style in SCHEDULES:
        yield RecipeLine(f"{ours}.schedule", style, (f"{theirs}.lr_decay_style",))
    else:
        advice = f"{ours}.schedule is one of {', '.join(SCHEDULES)}"
        yield Decision(f"{theirs}.lr_decay_style", style, advice)
    if style != "constant":
        # Megatron's own constant schedule never falls to min_lr.
        table = {f"{role}.megatron_cfg.optimizer.min_lr": (f"{ours}.min_lr", 5e-7)}
        yield from renamed(options, table)
        iters = options.take(f"{theirs}.lr_decay_iters", None)
        if iters is not None:
            yield Decision(f"{theirs}.lr_decay_iters", iters, "a schedule ends with run.steps")
    yield from renamed(options, {f"{theirs}.lr_warmup_iters": (f"{ours}.warmup_steps", 13)})
