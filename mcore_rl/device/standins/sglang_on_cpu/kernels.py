"""Torch versions of triton kernels for which SGLang's models have no other way on CPU."""

from typing import Any

import torch
from torch import Tensor


def gate_shared_expert() -> None:
    """Qwen2-MoE multiplies the shared expert by a sigmoid, and adds it to the others, in a triton kernel."""
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


def normalise_projections(minimax_m2: Any) -> None:
    """MiniMax-M2 normalises queries and keys over all heads, which lie on several ranks, in triton kernels.

    `minimax_m2` is SGLang's module of that name, which is imported for a model of its kind only.
    """
    minimax_m2.rms_sumsq_serial = _sums_of_squares
    minimax_m2.rms_apply_serial = _normalise


def _sums_of_squares(q: Tensor, k: Tensor) -> Tensor:
    """[2 * tokens]: those of the queries, then those of the keys."""
    return torch.cat([x.float().square().sum(-1) for x in (q, k)])


def _normalise(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    sums: Tensor,
    num_ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`sums` are of all ranks."""

    def normalise(x: Tensor, weight: Tensor, sum_T: Tensor) -> Tensor:
        scale_T1 = (sum_T / x.shape[-1] / num_ranks + eps).rsqrt()[:, None]
        return (x.float() * scale_T1 * weight.float()).to(x.dtype)

    return normalise(q, q_weight, sums[: len(q)]), normalise(k, k_weight, sums[len(q) : 2 * len(q)])
