"""Outcomes of a batch: roles, rewards of turns, values after the end, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.algo.batch_outcomes import (
    SampleShapes,
    groups_by_role,
    outcomes_of_scores,
    place_at_tokens,
    with_last_values,
    with_tokens,
    with_turn_rewards,
)
from mcore_rl.config import AlgorithmConfig
from mcore_rl.types import TrainBatch
from mcore_rl.types.scores import Scores

CONFIG = AlgorithmConfig()
SHAPES = SampleShapes(
    torch.tensor([7, 7, 7]), torch.tensor([2, 0, 1]), torch.tensor([True, True, False])
)
SCORES = Scores([1.0, 2.0, 3.0], {"right": [0.5, 0.0, 1.0]}, greedy_N=[0.25] * 3)


def make_batch(**fields: Any) -> TrainBatch:
    """Return the rows of a sample of two tokens and of one of a single token, after prompts."""
    mask_T = torch.tensor([False, True, True, False, True])
    return replace(TrainBatch(torch.arange(5), mask_T, (3, 2)), **fields)


def test_numbers_by_sample_need_no_batch() -> None:
    outcomes = outcomes_of_scores(SCORES, SHAPES, CONFIG, {"right": 0.5})
    assert outcomes.rewards_N.tolist() == [1.0, 2.0, 3.0]
    [(weight, values_N)] = outcomes.parts
    assert weight == 0.5 and values_N.tolist() == [0.5, 0.0, 1.0]
    assert outcomes.greedy_N is not None and outcomes.greedy_N.tolist() == [0.25] * 3
    assert outcomes.sum_of("logprobs_R") is None


def test_fields_of_tokens_are_those_of_trained_tokens() -> None:
    batch = make_batch(old_logprobs_T=torch.arange(5.0), values_T=-torch.arange(5.0))
    outcomes = with_tokens(outcomes_of_scores(SCORES, SHAPES, CONFIG, {}), batch, CONFIG)
    assert outcomes.logprobs_R is not None and outcomes.logprobs_R.tolist() == [1, 2, 4]
    assert outcomes.values_R is not None and outcomes.values_R.tolist() == [-1, -2, -4]
    sums_N = outcomes.sum_of("logprobs_R")
    assert sums_N is not None and sums_N.tolist() == [3, 0, 4]
    assert outcomes.ref_logprobs_R is None and outcomes.energy_R is None


def test_rewards_of_turns_are_taken_from_that_of_the_whole() -> None:
    batch = make_batch(turn_rewards_T=torch.tensor([0.0, 4.0, 0.0, 0.0, 2.0]))
    outcomes = outcomes_of_scores(SCORES, SHAPES, CONFIG, {})
    outcomes = replace(outcomes, token_rewards_R=torch.tensor([-0.5, -0.5, -0.5]).double())
    got = with_turn_rewards(outcomes, batch, weight=0.5)
    assert got.token_rewards_R is not None and got.token_rewards_R.tolist() == [1.5, -0.5, 0.5]
    assert got.rewards_N.tolist() == [-1.0, 2.0, 2.0]
    assert torch.equal(got.scores_N, outcomes.scores_N)
    assert with_turn_rewards(outcomes, make_batch(), 0.5) is outcomes


def test_only_samples_that_were_cut_off_have_a_value_after_their_end() -> None:
    """It lies at the first token of a row; the second sample has no row."""
    outcomes = outcomes_of_scores(SCORES, SHAPES, CONFIG, {})
    batch = make_batch(values_T=torch.tensor([9.0, 1.0, 1.0, 8.0, 1.0]))
    got = with_last_values(outcomes, batch, SHAPES).last_values_N
    assert got is not None and got.tolist() == [9.0, 0.0, 0.0]
    assert with_last_values(outcomes, make_batch(), SHAPES) is outcomes


def test_roles_split_a_group_and_must_be_told_by_the_rewards() -> None:
    group_N = groups_by_role(SHAPES.group_N, Scores([0.0] * 3, {"a": [1.0, 0.0, 1.0]}), "a")
    assert group_N[0] == group_N[2] != group_N[1]
    assert groups_by_role(SHAPES.group_N, SCORES, "") is SHAPES.group_N
    with pytest.raises(ValueError, match=r"algorithm\.role_part=b: .* only right"):
        groups_by_role(SHAPES.group_N, SCORES, "b")


def test_values_are_put_at_trained_tokens_or_refused() -> None:
    values_R = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    placed_T = place_at_tokens(make_batch(), values_R, CONFIG)
    assert placed_T.tolist() == [0, 1, 2, 0, 3] and placed_T.dtype == torch.float64
    with pytest.raises(ValueError, match=r"advantage=grpo returned shape \(2,\) for 3 response"):
        place_at_tokens(make_batch(), values_R[:2], CONFIG)
