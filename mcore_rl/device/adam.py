"""Adam for the distributed optimizer, without Transformer Engine; updates are in place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam, same interface and state layout, on torch's fused kernel.

    The state holds exp_avg and exp_avg_sq per parameter; 'step' is kept in the parameter group.
    torch.optim.AdamW keeps 'step' per parameter, and megatron-core cannot load a checkpoint of its
    distributed optimizer that was written with that layout.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False: torch's fused Adam always corrects the bias")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._kernel: Callable[..., None] = getattr(
            torch, "_fused_adamw_" if adam_w_mode else "_fused_adam_"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(
                        exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
                    )
            if params:
                self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        step = torch.tensor(float(group["step"]), device=params[0].device)
        self._kernel(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step] * len(params),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
