"""Torch versions of the kernels of mamba_ssm that megatron-core's Mamba-2 layer calls.

They take packed sequences. Each sequence begins with an empty state:

    zxBCdt    what a layer projects its inputs to [B, T, D]: gates z, then x, B, C and dt
    x         values of the heads [B, T, H, P]
    B, C      keys and queries of groups of heads [B, T, G, N]
    dt        step sizes [B, T, H]
    seq_idx   sequence of each token: 0 0 0 1 1 1 1

Source of the equations: arXiv:2405.21060, section 6 (chunks of a state space model).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.delta_net import causal_conv1d

CHUNK_LEN = 64


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    activation: str,
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Return the outputs of the scan [B, T, H * P], times silu(z).

    `chunk_size` changes no value but by rounding; CHUNK_LEN is taken.
    """
    assert not norm_before_gate, "gates are multiplied before the norm"
    inner = len(A) * headdim
    width = (len(conv1d_weight) - inner) // 2
    lens_N = [zxbcdt.shape[1]]
    if seq_idx is not None:
        assert len(seq_idx) == 1, "packed sequences lie one after another in a single row"
        lens_N = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    z, mixed, dt = zxbcdt.split([inner, inner + 2 * width, len(A)], -1)
    cu_seqlens = torch.tensor([0, *lens_N]).cumsum(0)
    mixed, _ = causal_conv1d(mixed, conv1d_weight, conv1d_bias, activation, cu_seqlens=cu_seqlens)
    x, key, query = mixed.split([inner, width, width], -1)
    step = F.softplus(dt.float() + dt_bias.float())
    parts = (
        x.unflatten(-1, (len(A), headdim)),
        step,
        key.unflatten(-1, (ngroups, -1)),
        query.unflatten(-1, (ngroups, -1)),
    )
    empty = x.new_zeros(len(x), len(A), headdim, width // ngroups, dtype=torch.float32)
    by_sequence = zip(*(part.split(lens_N, 1) for part in parts), strict=True)
    outs = [run_scan(*sequence, A=A, D=D, state=empty)[0] for sequence in by_sequence]
    return (torch.cat(outs, 1).flatten(-2) * F.silu(z.float())).to(zxbcdt.dtype)


def run_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *, A: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, H, P] of one sequence in float32, and the state [B, H, P, N] behind
    it.

    Token t makes the state S of a head exp(dt A) S + dt x B^T, and reads S C + D x. `dt` is
    positive, A [H] negative, D is [H]; heads H are a multiple of the groups of B and C.
    """
    num_heads = x.shape[2]
    x_H = x.float().transpose(1, 2)
    dt_H = dt.float().transpose(1, 2)
    key_H, query_H = (
        part.float().repeat_interleave(num_heads // part.shape[2], 2).transpose(1, 2)
        for part in (B, C)
    )
    decay_H = dt_H * A.float()[:, None]
    outs = []
    for first in range(0, x_H.shape[2], CHUNK_LEN):
        chunk = slice(first, first + CHUNK_LEN)
        values = x_H[:, :, chunk] * dt_H[:, :, chunk, None]
        key, query = key_H[:, :, chunk], query_H[:, :, chunk]
        log_decay = decay_H[:, :, chunk].cumsum(-1)
        between = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()
        since_start = log_decay.exp()[..., None]
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        outs.append((query @ key.mT * between) @ values + since_start * (query @ state.mT))
        state = since_start[..., -1:, :] * state + (to_end * values).mT @ key
    outs_H = torch.cat(outs, 2) + D.float()[:, None, None] * x_H
    return outs_H.transpose(1, 2), state


class PartitionedIndices:
    """The function of transformer_engine_torch that says which tokens a CP rank has."""

    @staticmethod
    def thd_get_partitioned_indices(
        cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int
    ) -> Tensor:
        """Return the tokens of rank `cp_rank`, int32, in its order: of each sequence two chunks."""
        lens_N = cu_seqlens.diff()
        chunk_N = lens_N // (2 * cp_size)
        position_T = torch.arange(total_tokens) - cu_seqlens[:-1].repeat_interleave(lens_N)
        chunk_T = position_T // chunk_N.repeat_interleave(lens_N)
        mine_T = (chunk_T == cp_rank) | (chunk_T == 2 * cp_size - 1 - cp_rank)
        return mine_T.nonzero()[:, 0].int()
