"""Sums over samples whose rows lie in several micro-batches: which are taken, and from what."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_rl.algo.sample_sums import add_up_samples, choose_sums, make_known_sums, with_sums
from mcore_rl.algo.sequences import SequenceSum, order_trained_tokens, samples_of_tokens
from mcore_rl.config import AlgorithmConfig, CorrectionConfig
from mcore_rl.types import StoredBatch, StoredColumn, SumsFrom, TrainBatch

CPU = torch.device("cpu")
TOKEN = AlgorithmConfig(correction=CorrectionConfig(weight="token"))
BY_CORRECTION = AlgorithmConfig(correction=CorrectionConfig(reject="sequence", reject_above=0.1))
BY_LOSS = AlgorithmConfig(loss="gmpo")
BYPASSED = AlgorithmConfig(loss="gspo", correction=CorrectionConfig(bypass=True))


def make_batch() -> TrainBatch:
    """Sample 7 has the rows of 2 and 1 tokens, sample 3 that between them."""
    mask_T = torch.ones(6, dtype=torch.bool)
    return TrainBatch(torch.arange(6), mask_T, (2, 3, 1), sample_N=(7, 3, 7))


@pytest.mark.parametrize(
    ("config", "knows_old", "is_first", "source"),
    [
        (TOKEN, True, False, "rows"),
        (BY_CORRECTION, True, True, "old"),
        (BY_CORRECTION, True, False, "old"),
        (BY_CORRECTION, False, True, "current"),
        (BY_LOSS, True, True, "old"),
        (BY_LOSS, True, False, "current"),
        (BY_LOSS, False, True, "current"),
        (BYPASSED, False, True, "current"),
    ],
)
def test_a_pass_is_paid_for_where_sums_are_not_known(
    config: AlgorithmConfig, knows_old: bool, is_first: bool, source: SumsFrom
) -> None:
    batch = replace(make_batch(), old_logprobs_T=torch.zeros(6) if knows_old else None)
    assert choose_sums(config, batch, is_first=is_first) == source
    for alone in ((7, 3, 5), None):
        one_row_each = replace(batch, sample_N=alone)
        assert choose_sums(config, one_row_each, is_first=is_first) == "rows"


NORMALIZED = AlgorithmConfig(correction=CorrectionConfig(weight="token", normalize=True))


@pytest.mark.parametrize(("knows_old", "source"), [(True, "old"), (False, "current")])
def test_a_mean_over_the_batch_is_never_that_of_rows(knows_old: bool, source: SumsFrom) -> None:
    places = np.zeros(3, dtype=np.int64)
    is_trained_N = np.ones(3, dtype=bool)
    batch = StoredBatch(places, places, np.arange(3), np.ones(3), (2, 3, 1), is_trained_N)
    batch = replace(batch, old_logprobs_T=StoredColumn("old_logprobs") if knows_old else None)
    for numbers in ((7, 3, 7), (7, 3, 5), None):
        sample_N = None if numbers is None else np.array(numbers)
        numbered = with_sums(NORMALIZED, replace(batch, sample_N=sample_N), is_first=False)
        assert numbered.sums_from == source and numbered.sample_N is not None
        assert tuple(numbered.sample_N.tolist()) == (numbers or (0, 1, 2))
    alone = with_sums(TOKEN, batch, is_first=False)
    assert (alone.sums_from, alone.sample_N) == ("rows", None)


def test_a_sum_over_the_batch_is_that_of_all_parts() -> None:
    def run(sums: SequenceSum) -> Tensor:
        of_batch_T = sums(torch.ones(3), whole_batch=True)
        return sums(of_batch_T) + sums(torch.tensor([1.0, 2.0, 4.0]), whole_batch=True)

    parts = [(run, torch.tensor([0, 0, 2])), (run, torch.tensor([2, 1, 1]))]
    totals = add_up_samples(parts, 3, CPU)
    assert [total.tolist() for total in totals] == [[2, 2, 2], [12, 12, 12], [3, 6, 5]]
    assert run(make_known_sums(totals, parts[1][1])).tolist() == [26, 26, 26]


def run_centered(values_T: Tensor) -> Callable[[SequenceSum], Tensor]:
    """Return a loss with a sum of what another sum gave: the squares of centered values."""

    def run(sums: SequenceSum) -> Tensor:
        means_T = sums(values_T) / sums(torch.ones_like(values_T))
        return sums((values_T - means_T).square())

    return run


def test_a_sum_of_what_another_sum_gave_is_that_of_all_rows() -> None:
    values_T = torch.tensor([1.0, 2.0, 10.0, 12.0, 14.0, 6.0], dtype=torch.float64)
    sample_T = samples_of_tokens(make_batch())
    assert sample_T.tolist() == [7, 7, 3, 3, 3, 7]
    parts = [
        (run_centered(values_T[rows]), sample_T[rows])
        for rows in (slice(0, 2), slice(2, 5), slice(5, 6))
    ]
    others_S = torch.zeros(9)

    def add_others(sums_S: Tensor) -> None:
        others_S.add_(sums_S.float())

    totals = add_up_samples(parts, 8, CPU, add_others)
    assert [total[[3, 7]].tolist() for total in totals] == [[36, 9], [3, 3], [8, 14]]
    assert all(len(total) == 8 for total in totals) and others_S[[3, 7]].tolist() == [47, 26]
    spread_T = run_centered(values_T)(make_known_sums(totals, sample_T))
    assert spread_T.tolist() == [14, 14, 8, 8, 8, 14]


def test_ranks_that_take_fewer_sums_go_on_with_the_others() -> None:
    """A rank whose losses take none adds nothing, in as many rounds as the others."""
    rounds = []

    def add_others(sums_S: Tensor) -> None:
        rounds.append(len(rounds))
        if len(rounds) <= 2:
            sums_S += torch.tensor([5.0, 1.0])

    totals = add_up_samples([(lambda sums: None, torch.zeros(2).long())], 1, CPU, add_others)
    assert [total.tolist() for total in totals] == [[5], [5]] and len(rounds) == 3


def test_a_loss_whose_sums_depend_on_values_is_refused() -> None:
    sums = make_known_sums([torch.ones(1)], torch.zeros(2).long())
    assert sums(torch.zeros(2)).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"more sums over samples .* than the 1 that it took"):
        sums(torch.zeros(2))


def test_trained_tokens_follow_one_another_as_they_were_sampled() -> None:
    turn_T = torch.tensor([0, 2, -1, 0, 0, 1], dtype=torch.int16)
    mask_T = turn_T >= 0
    batch = replace(make_batch(), loss_mask_T=mask_T, turn_T=turn_T)
    assert order_trained_tokens(batch).tolist() == [3, 4, 0, 5, 1]
    assert order_trained_tokens(replace(batch, turn_T=None)).tolist() == [0, 1, 3, 4, 5]
