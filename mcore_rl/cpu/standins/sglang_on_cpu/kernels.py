"""Torch versions of triton kernels for which SGLang's models have no CPU path."""

from typing import Any

import torch
from torch import Tensor


def gate_shared_expert() -> None:
    """Gate Qwen2-MoE's shared expert in torch.

    SGLang multiplies its output by a sigmoid, and adds it to the routed experts', in a triton
    kernel.
    """
    from sglang.kernels.ops.elementwise import elementwise

    def launch(
        hidden_states: Tensor,
        gate_weight: Tensor,
        shared_output: Tensor,
        output: Tensor,
        *,
        do_add: bool,
    ) -> None:
        gate_T1 = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
        gated = gate_T1 * shared_output.float()
        output.copy_(output.float() + gated if do_add else gated)

    elementwise._launch_fused_gate_sigmoid_mul = launch


def normalize_projections(minimax_m2: Any) -> None:
    """Normalize MiniMax-M2's queries and keys over the heads of all ranks in torch.

    SGLang does it in triton kernels. `minimax_m2` is SGLang's module of that name, which is
    imported only for such a model; import_models_when_asked calls this function then.
    """
    minimax_m2.rms_sumsq_serial = _sums_of_squares
    minimax_m2.rms_apply_serial = _normalize


def _sums_of_squares(q: Tensor, k: Tensor) -> Tensor:
    """Return the queries' sums of squares, then the keys', [2 * tokens]."""
    return torch.cat([x.float().square().sum(-1) for x in (q, k)])


def _normalize(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    sums: Tensor,
    num_ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return this rank's normalized (q, k); `sums` is the total over all ranks."""

    def normalize(x: Tensor, weight: Tensor, sum_T: Tensor) -> Tensor:
        scale_T1 = (sum_T / x.shape[-1] / num_ranks + eps).rsqrt()[:, None]
        return (x.float() * scale_T1 * weight.float()).to(x.dtype)

    normed_q = normalize(q, q_weight, sums[: len(q)])
    normed_k = normalize(k, k_weight, sums[len(q) : 2 * len(q)])
    return normed_q, normed_k
