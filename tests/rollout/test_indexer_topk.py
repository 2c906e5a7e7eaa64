"""Reported keys are decoded; impossible ones are refused by prompt, token and layer."""

import base64

import pytest
import torch

from mcore_rl.rollout.indexer_topk import IndexerTopkShape

SHAPE = IndexerTopkShape(num_layers=2, top_k=3)


def encode(keys_TLK: torch.Tensor) -> str:
    return base64.b64encode(keys_TLK.to(torch.int32).numpy().tobytes()).decode()


def make_keys() -> torch.Tensor:
    """Return those of five tokens: three see no more keys than are chosen, two choose."""
    keys_TK = torch.tensor([[0, -1, -1], [1, 0, -1], [2, 0, 1], [3, 0, 2], [1, 4, 0]])
    return keys_TK[:, None].repeat(1, 2, 1)


def test_keys_come_back_in_order() -> None:
    got = SHAPE.decode(encode(make_keys()), 5, "prompt 7")
    wanted_TK = [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 2, 3], [0, 1, 4]]
    assert got.dtype == torch.int16 and got[:, 0].tolist() == got[:, 1].tolist() == wanted_TK


def test_tokens_that_choose_nothing_need_no_report() -> None:
    """Where SGLang runs no indexer, its rows are those of another request."""
    keys_TLK = make_keys()
    keys_TLK[:3] = torch.tensor([77, 9, 9])
    got = SHAPE.decode(encode(keys_TLK), 5, "prompt 7")
    assert torch.equal(got, SHAPE.decode(encode(make_keys()), 5, "prompt 7"))
    short = SHAPE.decode(encode(keys_TLK[:2]), 2, "prompt 7")
    assert short[:, 0].tolist() == [[0, -1, -1], [0, 1, -1]]


def test_long_sequences_have_wide_numbers() -> None:
    num_tokens = 2**15
    keys_TLK = torch.arange(num_tokens)[:, None, None] - torch.tensor([0, 2, 1]).repeat(2, 1)
    got = SHAPE.decode(encode(keys_TLK), num_tokens, "prompt 7")
    assert got.dtype == torch.int32
    assert got[-1, 1].tolist() == [num_tokens - 3, num_tokens - 2, num_tokens - 1]


@pytest.mark.parametrize(
    "keys", [[1, 0, 1], [5, 1, 0], [0, -1, 2]], ids=["twice", "later", "missing"]
)
def test_keys_that_no_indexer_chooses_are_refused(keys: list[int]) -> None:
    keys_TLK = make_keys()
    keys_TLK[4, 1] = torch.tensor(keys)
    named = r"prompt 7: keys \[.*\] of token 4 in layer 1 are not 3 different ones of 0 to 4: .*"
    with pytest.raises(ValueError, match=named + "drift.indexer_topk=false"):
        SHAPE.decode(encode(keys_TLK), 5, "prompt 7")


def test_another_number_of_layers_or_none_at_all_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"prompt 7: .* 15 choices .* expected 5 tokens \* 2 layers \* 3"
    ):
        SHAPE.decode(encode(make_keys()[:, :1]), 5, "prompt 7")
    with pytest.raises(ValueError, match="prompt 7: the engine did not tell which keys"):
        SHAPE.decode(None, 5, "prompt 7")
