"""Takes no optimizer step on a loss or a gradient that is not finite.

losses of the micro-batches --> not finite on any rank? --+
gradients --> norm over all ranks ------------------------+--> weights and moments stay as they are

All ranks know both, so all decide alike. The host reads them at once, after the gradients were
clipped and before the update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from mcore_rl.device import device


@dataclass(frozen=True)
class Update:
    """The outcome of an optimizer step.

    grad_norm      before clipping
    has_bad_loss   whether the loss of some micro-batch, on whatever rank, is not finite
    is_taken       False: weights and moments are as they were
    """

    grad_norm: float
    has_bad_loss: bool
    is_taken: bool


class GuardedOptimizer(ChainedOptimizer):
    """megatron-core's optimizer, which leaves out updates that would put NaN into the weights."""

    _losses: Sequence[Tensor] = ()
    _norm: Any = 0.0
    _has_bad_loss: Tensor | None = None
    _known: tuple[float, bool] | None = None

    def update(self, losses: Sequence[Tensor]) -> Update:
        """Take a step, or leave it out; a collective over all ranks.

        losses   of this rank's micro-batches; empty before the last stage
        """
        self._losses = losses
        self._known = None
        succeeded, _, _ = self.step()
        norm, has_bad_loss = self._read()
        is_refused = has_bad_loss or not math.isfinite(norm)
        is_refused |= norm > self.config.grad_norm_skip_threshold
        assert succeeded or is_refused, f"a step was skipped: gradient norm {norm}"
        return Update(norm, has_bad_loss, bool(succeeded))

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm over all ranks, and learn whether any rank has a loss not finite."""
        losses = [torch.zeros((), device=device()), *self._losses]
        bad = [loss.isfinite().logical_not() for loss in losses]
        self._has_bad_loss = torch.stack(bad).any().float()
        dist.all_reduce(self._has_bad_loss, op=dist.ReduceOp.MAX)
        self._norm = super().get_grad_norm()
        return self._norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the weights; return False and leave them alone if a number is not finite."""
        norm, has_bad_loss = self._read()
        if has_bad_loss or not math.isfinite(norm):
            return False
        return super().step_with_ready_grads()

    def _read(self) -> tuple[float, bool]:
        """Return (gradient's norm, whether a loss is not finite); the host waits for the device."""
        if self._known is None:
            assert self._has_bad_loss is not None, "no norm was computed"
            if isinstance(self._norm, Tensor):
                both = torch.stack([self._norm.reshape(()).float(), self._has_bad_loss])
                norm, has_bad_loss = both.tolist()
            else:
                norm, has_bad_loss = float(self._norm), float(self._has_bad_loss)
            self._known = norm, bool(has_bad_loss)
        return self._known
