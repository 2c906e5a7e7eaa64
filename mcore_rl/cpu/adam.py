"""Adam for the distributed optimizer, without Transformer Engine; updates are in place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam, same interface and state layout, on torch's fused kernel.

    The state holds exp_avg and exp_avg_sq per parameter; 'step' is kept in the parameter group.
    torch.optim.AdamW keeps 'step' per parameter, and megatron-core cannot load a checkpoint of its
    distributed optimizer that was written with that layout.

    The last five arguments are those of megatron-core's precision-aware optimizer. Moments of
    another precision are computed with in float32 and then rounded, as Transformer Engine does.

    master_weights        keep a float32 main weight of each parameter in its state
    use_decoupled_grad    read gradients from `decoupled_grad`, which may have another dtype
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
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction=False: torch's fused Adam always corrects the bias")
        if store_param_remainders or master_weight_dtype != torch.float32:
            raise ValueError("main weights are whole, in float32; there is nothing else here")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._kernel: Callable[..., None] = getattr(
            torch, "_fused_adamw_" if adam_w_mode else "_fused_adam_"
        )
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self._master_weights = master_weights
        self._gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if getattr(p, self._gradient, None) is not None]
            for p in params:
                if not self.state[p]:
                    self.initialize_state(p, False)
            if params:
                self._update(params, group)

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Make a parameter's moments, zero, and its main weight, which is always whole."""
        state = self.state[param]
        for name, dtype in self._dtypes.items():
            moment_dtype = dtype if self._is_precision_aware else param.dtype
            state[name] = torch.zeros_like(param, dtype=moment_dtype)
        if self._master_weights:
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a moment or the main weight in float32."""
        return self.state[param][name].float()

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        """Set a moment or the main weight from float32 values."""
        if not self.state[param]:
            self.initialize_state(param, False)
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as every optimizer does, but keep the dtypes of the state, not the parameters'.

        As with Transformer Engine, the state lies in new memory afterwards.
        """
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            for name, value in state.items():
                self.state[params[number]][name] = value.to(params[number].device, copy=True)

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    @property
    def _is_precision_aware(self) -> bool:
        return self._master_weights or set(self._dtypes.values()) != {torch.float32}

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        step = torch.tensor(float(group["step"]), device=params[0].device)
        states = [self.state[p] for p in params]
        mains = [
            s["master_param"] if self._master_weights else p
            for p, s in zip(params, states, strict=True)
        ]
        moments = {
            name: [s[name].to(m.dtype) for s, m in zip(states, mains, strict=True)]
            for name in MOMENTS
        }
        self._kernel(
            mains,
            [getattr(p, self._gradient).to(m.dtype) for p, m in zip(params, mains, strict=True)],
            moments["exp_avg"],
            moments["exp_avg_sq"],
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
        for i, (param, state) in enumerate(zip(params, states, strict=True)):
            for name in MOMENTS:
                state[name].copy_(moments[name][i])
            if self._master_weights:
                param.copy_(mains[i])
