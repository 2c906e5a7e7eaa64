"""The scan of Mamba-2 equals transformers' on each packed sequence, gradients too."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as oracle
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from mcore_rl.cpu.gated_norm import GatedNorm
from mcore_rl.cpu.mamba import (
    CHUNK_LEN,
    PartitionedIndices,
    mamba_split_conv1d_scan_combined,
    run_scan,
)

HEADS, HEAD, GROUPS, STATE, WIDTH = 6, 5, 3, 4, 4
INNER = HEADS * HEAD
CONV = INNER + 2 * GROUPS * STATE
LENS = (3, 2 * CHUNK_LEN + 7, 1)


def make_inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = {
        "zxbcdt": torch.randn(1, sum(LENS), 2 * INNER + 2 * GROUPS * STATE + HEADS),
        "conv1d_weight": torch.randn(CONV, WIDTH),
        "conv1d_bias": torch.randn(CONV),
        "dt_bias": torch.randn(HEADS),
        "A": -torch.rand(HEADS) - 0.1,
        "D": torch.randn(HEADS),
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


def scan(inputs: dict[str, Tensor]) -> Tensor:
    numbers = torch.arange(len(LENS), dtype=torch.int32)
    return mamba_split_conv1d_scan_combined(
        **inputs,
        chunk_size=128,
        activation="silu",
        headdim=HEAD,
        ngroups=GROUPS,
        norm_before_gate=False,
        seq_idx=numbers.repeat_interleave(torch.tensor(LENS))[None],
    )


def scan_sequence(inputs: dict[str, Tensor], rows: slice) -> Tensor:
    z, mixed, dt = inputs["zxbcdt"][:, rows].split([INNER, CONV, HEADS], -1)
    convolved = oracle.causal_conv1d_fn(
        mixed.mT, inputs["conv1d_weight"], inputs["conv1d_bias"], activation="silu"
    ).mT
    x, key, query = convolved.split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
    out: Any = oracle.mamba2_chunk_scan(
        x.unflatten(-1, (HEADS, HEAD)),
        dt,
        inputs["A"],
        key.unflatten(-1, (GROUPS, STATE)),
        query.unflatten(-1, (GROUPS, STATE)),
        chunk_size=16,
        D=inputs["D"],
        dt_bias=inputs["dt_bias"],
        dt_softplus=True,
    )
    return out.flatten(-2) * F.silu(z)


def test_packed_sequences_do_not_see_each_other() -> None:
    inputs = make_inputs()
    stops = torch.tensor(LENS).cumsum(0).tolist()
    spans = zip(stops, LENS, strict=True)
    wanted = torch.cat([scan_sequence(inputs, slice(end - n, end)) for end, n in spans], 1)
    got = scan(inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(got)
    found = torch.autograd.grad((got * weights).sum(), list(inputs.values()))
    expected = torch.autograd.grad((wanted * weights).sum(), list(inputs.values()))
    for name, a, b in zip(inputs, found, expected, strict=True):
        largest = float(b.abs().max())
        assert float((a - b).abs().max()) < 1e-4 * largest, name


def test_a_state_is_carried_on() -> None:
    torch.manual_seed(0)
    x, dt = torch.randn(2, 9, HEADS, HEAD), torch.rand(2, 9, HEADS)
    key, query = torch.randn(2, 2, 9, GROUPS, STATE)
    decay, skip = -torch.rand(HEADS), torch.randn(HEADS)
    empty = torch.zeros(2, HEADS, HEAD, STATE)
    parts = (x, dt, key, query)
    whole, last = run_scan(*parts, A=decay, D=skip, state=empty)
    first, state = run_scan(*(p[:, :4] for p in parts), A=decay, D=skip, state=empty)
    rest, state = run_scan(*(p[:, 4:] for p in parts), A=decay, D=skip, state=state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    torch.testing.assert_close(state, last)


def test_the_norm_is_that_of_each_group() -> None:
    torch.manual_seed(0)
    norm = GatedNorm(12, eps=1e-5, group_size=4, norm_before_gate=False)
    wanted = Zamba2RMSNormGated(12, group_size=4, eps=1e-5)
    norm.weight.data.copy_(torch.randn(12))
    wanted.weight.data.copy_(norm.weight)
    x, gate = torch.randn(2, 5, 12)
    torch.testing.assert_close(norm(x, gate), wanted(x, gate))
    torch.testing.assert_close(norm(x * F.silu(gate)), wanted(x, gate))


def test_a_rank_has_two_chunks_of_each_sequence() -> None:
    cu_seqlens = torch.tensor([0, 4, 12])
    indices = PartitionedIndices.thd_get_partitioned_indices
    assert indices(cu_seqlens, 12, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert indices(cu_seqlens, 12, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
