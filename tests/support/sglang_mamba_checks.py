"""Checks of the stand-ins for SGLang's Mamba-2 layers: prompts, and tokens after them."""

# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import Tensor

from tests.support.upstream import assert_defect

HEADS, HEAD, GROUPS, STATE = 4, 5, 2, 6
LENS = (3, 70)
SLOTS = torch.tensor([4, 1])


def check_scan_in_torch() -> None:
    """SGLang lacks the convolution on CPU; with the patch prompts that are cut in two, and tokens
    after them, give what transformers gives for the whole.
    """
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.models import nemotron_h
    from sglang_on_cpu.mamba2 import forward_experts, scan_in_torch

    assert_defect("scan_in_torch", not hasattr(mamba, "causal_conv1d_fn_triton"))
    scan_in_torch(nemotron_h)
    assert mamba.causal_conv1d_fn_triton and mamba.causal_conv1d_update_triton
    assert nemotron_h.NemotronHMoE._forward_core_normal is forward_experts
    torch.manual_seed(0)
    num_tokens = sum(LENS)
    x, dt = torch.randn(num_tokens, HEADS, HEAD), torch.randn(num_tokens, HEADS)
    key, query = torch.randn(2, num_tokens, GROUPS, STATE)
    parts = {"x": x, "dt": dt, "B": key, "C": query}
    decay, skip, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    layer = {"A": decay, "D": skip, "dt_bias": bias}
    states = torch.zeros(6, HEADS, HEAD, STATE)
    out = torch.empty(num_tokens, HEADS, HEAD)
    halves = ([[0], range(3, 40)], [[1], range(40, 72)])
    for rows, known in zip(halves, (False, True), strict=True):
        _scan_prompts(mamba, parts, layer, states, out, rows, known=known)
    _scan_tokens(mamba, parts, layer, states, out, [2, 72])
    for slot, first, length in zip(SLOTS, (0, 3), LENS, strict=True):
        own = slice(first, first + length)
        wanted, state = _scan_whole(parts, layer, own)
        torch.testing.assert_close(out[own], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[slot], state, rtol=1e-4, atol=1e-4)
    assert not states[[0, 2, 3, 5]].any()


def _scan_prompts(
    mamba: Any,
    parts: dict[str, Tensor],
    layer: dict[str, Tensor],
    states: Tensor,
    out: Tensor,
    rows: Any,
    *,
    known: bool,
) -> None:
    tokens = [token for own in rows for token in own]
    filled = torch.empty(1, len(tokens), HEADS, HEAD)
    _, behind, _ = mamba.mamba_chunk_scan_combined(
        *(part[None, tokens] for part in (parts["x"], parts["dt"])),
        layer["A"],
        *(part[None, tokens] for part in (parts["B"], parts["C"])),
        chunk_size=16,
        D=layer["D"],
        z=None,
        dt_bias=layer["dt_bias"],
        cu_seqlens=torch.tensor([0, len(rows[0]), len(tokens)]),
        initial_states=states[SLOTS] if known else None,
        out=filled,
        state_dtype=torch.float32,
    )
    out[tokens] = filled[0]
    states[SLOTS] = behind


def _scan_tokens(
    mamba: Any,
    parts: dict[str, Tensor],
    layer: dict[str, Tensor],
    states: Tensor,
    out: Tensor,
    rows: list[int],
) -> None:
    """Give one more token of each request, and one of a request that only fills the batch."""
    tokens = [*rows, rows[0]]
    slots = torch.cat([SLOTS, torch.tensor([-1])])
    filled = torch.empty(len(tokens), HEADS, HEAD)
    mamba.selective_state_update(
        states,
        parts["x"][tokens],
        parts["dt"][tokens, :, None].expand(-1, -1, HEAD),
        layer["A"][:, None, None].expand(-1, HEAD, STATE),
        parts["B"][tokens],
        parts["C"][tokens],
        layer["D"][:, None].expand(-1, HEAD),
        z=None,
        dt_bias=layer["dt_bias"][:, None].expand(-1, HEAD),
        dt_softplus=True,
        state_batch_indices=slots,
        out=filled,
    )
    out[rows] = filled[: len(rows)]


def _scan_whole(
    parts: dict[str, Tensor], layer: dict[str, Tensor], own: slice
) -> tuple[Tensor, Tensor]:
    from transformers.models.nemotron_h import modeling_nemotron_h as oracle

    x, dt, key, query = (part[None, own] for part in parts.values())
    wanted, state = oracle.mamba2_chunk_scan(
        x,
        dt,
        layer["A"],
        key,
        query,
        chunk_size=16,
        D=layer["D"],
        dt_bias=layer["dt_bias"],
        dt_softplus=True,
        return_final_states=True,
    )
    return wanted[0], state[0]
