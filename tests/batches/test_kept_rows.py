"""A row's columns are laid out as the request says, whatever they are kept as."""

import numpy as np
import pytest
import torch

from mcore_rl.batches.episodes import TOKEN_IDS
from mcore_rl.batches.kept_rows import (
    LOGPROBS,
    ROUTED_EXPERTS,
    STALE,
    KeptRow,
    ReadRequest,
    as_response,
    column_of,
    lay_out,
)
from mcore_rl.types import Array, Prompt, VersionSpan, WeightVersion


def row(num_tokens: int, version: int, **columns: Array) -> KeptRow:
    span = VersionSpan(1, num_tokens, WeightVersion(version))
    return KeptRow((span,), {TOKEN_IDS: np.arange(num_tokens, dtype=np.int32), **columns})


def request(**options: object) -> ReadRequest:
    nobody = np.zeros(0, np.int64)
    return ReadRequest(nobody, nobody, (), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOGPROBS)
def test_log_probs_are_read_as_float32(name: str) -> None:
    exact = np.array([0.0, -0.1234567, -9.87654321], np.float32)
    halved = torch.from_numpy(exact).bfloat16()
    kept = row(3, 0, **{name: halved.view(torch.uint16).numpy()})
    assert column_of(kept, name).dtype == np.float32
    assert column_of(kept, name).tolist() == halved.tolist()
    assert column_of(row(3, 0, **{name: exact}), name).tolist() == exact.tolist()


def test_other_numbers_of_two_bytes_are_not_taken_for_log_probs() -> None:
    counts = np.array([1, 2, 3], np.uint16)
    assert column_of(row(3, 0, turn=counts), "turn").tolist() == [1, 2, 3]


def test_tokens_of_other_weights_are_stale() -> None:
    rows = [row(3, 4), row(2, 5)]
    assert lay_out(STALE, rows, request(version=5)).tolist() == [False, True, True, False, False]


def test_experts_are_those_of_the_ranges_and_layers() -> None:
    first = np.arange(2 * 3 * 1).reshape(2, 3, 1)
    second = first + 10
    rows = [row(3, 0, routed_experts=first), row(3, 0, routed_experts=second)]
    ranges = np.array([[1, 1, 3], [0, 0, 1]])
    found = lay_out(ROUTED_EXPERTS, rows, request(layers=(2,), experts_R3=ranges))
    assert found[:, :, 0].tolist() == [[15], [0], [2]], "the last token's experts are zeros"


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(KeyError, match="values"):
        lay_out("values", [row(2, 0)], request())


def test_a_row_is_a_response_to_what_comes_before_a_token() -> None:
    prompt = Prompt(7, (1,), (), "unit", "")
    sample = as_response(prompt, 3, [1, 2, 3, 4], 3)
    assert sample.prompt.token_ids == (1, 2, 3) and sample.response_ids == (4,)
    assert sample.sample_index == 3 and sample.prompt.index == 7
