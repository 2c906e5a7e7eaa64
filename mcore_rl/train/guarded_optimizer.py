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
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from torch import Tensor

from mcore_rl.device import device

APART = MTP_GRAD_NORM_GROUP
"""The group of parameters whose gradient has a norm of its own and is clipped by it: the only one
that megatron-core has. It is of layers for multi-token prediction, or of indexers."""


@dataclass(frozen=True)
class Update:
    """The outcome of an optimizer step.

    grad_norm      before clipping, of all parameters but those set apart
    apart_norm     the same of those; None if there are none
    has_bad_loss   whether the loss of some micro-batch, on whatever rank, is not finite
    is_taken       False: weights and moments are as they were
    """

    grad_norm: float
    apart_norm: float | None
    has_bad_loss: bool
    is_taken: bool

    def list_metrics(self, apart: str) -> dict[str, float]:
        """Return the metrics of the update beside the norm; `apart` names what is set apart."""
        own = {} if self.apart_norm is None else {f"{apart}/grad_norm": self.apart_norm}
        return {**own, "train/skipped_share": float(not self.is_taken)}


class GuardedOptimizer(ChainedOptimizer):
    """megatron-core's optimizer, which leaves out updates that would put NaN into the weights."""

    _losses: Sequence[Tensor] = ()
    _norm: Any = 0.0
    _apart_norm: Any = None
    _has_bad_loss: Tensor | None = None
    _known: tuple[float, float | None, bool] | None = None

    def update(self, losses: Sequence[Tensor]) -> Update:
        """Take a step, or leave it out; a collective over all ranks.

        losses   of this rank's micro-batches; empty before the last stage
        """
        self._losses = losses
        self._known = None
        succeeded, _, _ = self.step()
        norm, apart_norm, has_bad_loss = self._read()
        is_refused = self._is_bad() or norm > self.config.grad_norm_skip_threshold
        assert succeeded or is_refused, f"a step was skipped: gradient norm {norm}"
        return Update(norm, apart_norm, has_bad_loss, bool(succeeded))

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm over all ranks, and learn whether any rank has a loss not finite."""
        losses = [torch.zeros((), device=device()), *self._losses]
        bad = [loss.isfinite().logical_not() for loss in losses]
        self._has_bad_loss = torch.stack(bad).any().float()
        dist.all_reduce(self._has_bad_loss, op=dist.ReduceOp.MAX)
        self._norm = super().get_grad_norm()
        if self.has_grad_norm_group(APART):
            self._apart_norm = self._get_grad_norm_for_group(APART)
        return self._norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the weights; return False and leave them alone if a number is not finite."""
        return not self._is_bad() and super().step_with_ready_grads()

    def _is_bad(self) -> bool:
        norm, apart_norm, has_bad_loss = self._read()
        return has_bad_loss or not math.isfinite(norm) or not math.isfinite(apart_norm or 0.0)

    def _read(self) -> tuple[float, float | None, bool]:
        """Return (norm of the gradient, norm of the part set apart, whether a loss is not finite).

        The host waits for the device once.
        """
        if self._known is None:
            assert self._has_bad_loss is not None, "no norm was computed"
            read = [self._norm, 0.0 if self._apart_norm is None else self._apart_norm]
            norms = [torch.as_tensor(norm, device=device()).reshape(()).float() for norm in read]
            norm, apart_norm, bad = torch.stack([*norms, self._has_bad_loss]).tolist()
            self._known = norm, None if self._apart_norm is None else apart_norm, bool(bad)
        return self._known
