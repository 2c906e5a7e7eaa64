"""Sums over sequences, also where other ranks hold a part of each."""

import pytest
import torch

from mcore_rl.algo.sequences import Sequences, sequence_sum


def test_each_token_gets_the_sum_of_its_sequence_without_gradient() -> None:
    values_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], requires_grad=True)
    sums_T = sequence_sum([2, 0, 3], torch.device("cpu"))(values_T)
    assert sums_T.tolist() == [3.0, 3.0, 28.0, 28.0, 28.0]
    assert not sums_T.requires_grad and sums_T.dtype == torch.float32


def test_what_other_ranks_have_is_added() -> None:
    def add_others(sums_N: torch.Tensor) -> None:
        assert sums_N.dtype == torch.float64 and sums_N.tolist() == [3.0, 4.0]
        sums_N += torch.tensor([10.0, 20.0])

    sums_T = sequence_sum([2, 1], torch.device("cpu"), add_others)(torch.tensor([1.0, 2.0, 4.0]))
    assert sums_T.tolist() == [13.0, 13.0, 24.0]


def test_many_small_values_add_up_in_double_precision() -> None:
    values_T = torch.full((100_000,), 0.1)
    total = sequence_sum([100_000], torch.device("cpu"))(values_T)[0]
    assert abs(float(total) - 100_000 * float(torch.tensor(0.1))) < 1e-2


def test_means_over_the_batch_give_tokens_or_samples_equal_shares() -> None:
    mask_T = torch.tensor([True, True, True, False, True, True])
    values_T = torch.tensor([1.0, 2.0, 3.0, torch.nan, 10.0, 20.0], dtype=torch.float64)
    sequences = Sequences(sequence_sum([4, 2], torch.device("cpu")), mask_T)
    assert sequences.batch_mean(values_T, of_samples=False).tolist() == [36 / 5] * 6
    assert sequences.batch_mean(values_T, of_samples=True).tolist() == [(2 + 15) / 2] * 6


def test_rows_of_a_larger_step_have_no_sum_over_it() -> None:
    sums = sequence_sum([2], torch.device("cpu"), is_whole_batch=False)
    assert sums(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(AssertionError, match="a sum over the batch"):
        sums(torch.ones(2), whole_batch=True)
