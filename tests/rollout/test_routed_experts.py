"""Reported experts are decoded; impossible ones are refused by prompt, token and layer."""

import base64

import pytest
import torch

from mcore_rl.rollout.request import RoutedExpertsShape

SHAPE = RoutedExpertsShape((False, True, True), top_k=2, num_experts=4)


def encode(experts_TLK: torch.Tensor) -> str:
    return base64.b64encode(experts_TLK.to(torch.int32).numpy().tobytes()).decode()


def make_experts() -> torch.Tensor:
    experts_TLK = torch.tensor([[0, 0], [3, 1], [2, 0]]).repeat(5, 1, 1)
    assert experts_TLK.shape == (5, 3, 2)
    return experts_TLK


def test_experts_come_back() -> None:
    got = SHAPE.decode(encode(make_experts()), 5, "prompt 7")
    assert got.dtype == torch.int16 and torch.equal(got, make_experts().short())


@pytest.mark.parametrize(
    "experts", [[1, 1], [4, 1], [0, -1]], ids=["twice", "too large", "negative"]
)
def test_experts_that_no_token_can_go_to_are_refused(experts: list[int]) -> None:
    experts_TLK = make_experts()
    experts_TLK[:, 0] = torch.tensor(experts)  # of a dense layer: nobody reads them
    SHAPE.decode(encode(experts_TLK), 5, "prompt 7")
    experts_TLK[3, 2] = torch.tensor(experts)
    named = rf"prompt 7: experts \[{experts[0]}, {experts[1]}\] of token 3 in layer 2 .* model.path"
    with pytest.raises(ValueError, match=named):
        SHAPE.decode(encode(experts_TLK), 5, "prompt 7")


def test_another_number_of_layers_or_none_at_all_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"prompt 7: .* 20 choices .* expected 5 tokens \* 3 layers \* 2"
    ):
        SHAPE.decode(encode(make_experts()[:, :2]), 5, "prompt 7")
    with pytest.raises(
        ValueError, match=r"prompt 7: the engine did not tell .* drift.routed_experts=false"
    ):
        SHAPE.decode(None, 5, "prompt 7")
