"""The delta net's operations equal transformers' on each packed sequence, gradients too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from mcore_rl.cpu.delta_net import CHUNK_LEN, causal_conv1d, chunk_gated_delta_rule, l2norm

LENS = (1, CHUNK_LEN, 2 * CHUNK_LEN + 5, 7)
HEADS, KEY, VALUE = 3, 8, 5


def draw(*shape: int) -> Tensor:
    return torch.randn(1, sum(LENS), *shape)


def draw_inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    inputs: dict[str, Tensor] = {
        "q": draw(HEADS, KEY),
        "k": l2norm(draw(HEADS, KEY)),
        "v": draw(HEADS, VALUE),
        "g": -draw(HEADS).abs(),
        "beta": draw(HEADS).sigmoid(),
    }
    return {name: value.requires_grad_() for name, value in inputs.items()}


def apply_by_sequence(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the outputs of `function` on each sequence of inputs [1, T, ...], end to end."""
    parts = zip(*(x.split(LENS, 1) for x in inputs), strict=True)
    return torch.cat([function(*part) for part in parts], 1)


def with_gradients(out: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), list(inputs.values()))]


def attend_token_by_token(*inputs: Tensor) -> Tensor:
    return oracle.torch_recurrent_gated_delta_rule(*inputs)[0]


@pytest.mark.parametrize("normalized", [False, True])
def test_chunks_of_packed_sequences_give_what_a_state_gives_token_by_token(
    normalized: bool,
) -> None:
    inputs = draw_inputs()
    cu_seqlens = torch.tensor((0, *LENS)).cumsum(0)
    got, state = chunk_gated_delta_rule(
        **inputs, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=normalized
    )
    assert state is None
    given = dict(inputs)
    if normalized:
        given |= {name: l2norm(given[name]) for name in "qk"}
    wanted = apply_by_sequence(attend_token_by_token, *given.values())
    for a, b in zip(with_gradients(got, inputs), with_gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_strong_decay_neither_overflows_nor_gives_gradients_that_are_not_numbers() -> None:
    inputs = draw_inputs()
    inputs["g"] = (200.0 * inputs["g"]).detach().requires_grad_()
    got = chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor((0, *LENS)).cumsum(0))[0]
    wanted = apply_by_sequence(attend_token_by_token, *inputs.values())
    for a, b in zip(with_gradients(got, inputs), with_gradients(wanted, inputs), strict=True):
        assert a.isfinite().all()
        # A chunk's decay is a difference of sums of logarithms, here of about -10000.
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_convolution_sees_the_tokens_of_its_own_sequence() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4, requires_grad=True)
    inputs: dict[str, Any] = {"x": draw(6).requires_grad_(), "weight": weight}
    cu_seqlens = torch.tensor((0, *LENS)).cumsum(0)
    got, _ = causal_conv1d(**inputs, activation="silu", cu_seqlens=cu_seqlens)

    def convolve(x: Tensor) -> Tensor:
        made = oracle.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu")
        return made.transpose(1, 2)

    wanted = apply_by_sequence(convolve, inputs["x"])
    for a, b in zip(with_gradients(got, inputs), with_gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
