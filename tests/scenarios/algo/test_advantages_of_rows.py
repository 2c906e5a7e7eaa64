"""Each token of an episode has the same advantage and return in any rows, for every advantage."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mcore_rl.agents.turn_tree import Cut, TurnTree, at_leaves, at_turns
from mcore_rl.algo.covariance import pick_between, pick_largest, with_held_back
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.registry import Pick, advantages
from mcore_rl.algo.sequences import order_trained_tokens
from mcore_rl.config import AlgorithmConfig, CovarianceConfig, KLConfig
from mcore_rl.types import Prompt, Sample, TrainBatch
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch, mask_truncated
from tests.support.turn_trees import random_tree, sample_of

NUM_SAMPLES = 6
SCORES = Scores(
    [1.0, 0.0, 3.0, 2.0, -1.0, 0.5],
    parts={"right": [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], "form": [0.2, 0.1, 0.4, 0.3, 0.2, 0.1]},
    greedy_N=[0.5] * 3 + [0.25] * 3,
)
FIELDS = ("old_logprobs_T", "ref_logprobs_T", "teacher_logprobs_T", "values_T", "sum_squares_T")


def at_turns_backward(tree: TurnTree) -> list[int]:
    """End the row of the last turn first: it trains all turns on its way."""
    return list(reversed(at_turns(tree)))


CUTS: list[Cut] = [at_leaves, at_turns, at_turns_backward]


def make_samples(cut: Cut) -> list[Sample]:
    """Return episodes of two prompts, with branches and rewards of turns."""
    trees = [random_tree(random.Random(n), 6) for n in range(NUM_SAMPLES)]
    prompts = [Prompt(n // 3, (1,), (), "unit", None) for n in range(NUM_SAMPLES)]
    return [
        sample_of(tree, prompt, n, cut)
        for n, (tree, prompt) in enumerate(zip(trees, prompts, strict=True))
    ]


def make_batch(cut: Cut) -> TrainBatch:
    """Return their rows, with numbers that go with the token, whatever row it is in."""
    batch = make_train_batch(make_samples(cut))
    in_order = order_trained_tokens(batch)
    generator = torch.Generator().manual_seed(2)
    values = {}
    for name in FIELDS:
        values[name] = torch.zeros(len(batch.token_ids_T))
        values[name][in_order] = torch.rand(len(in_order), generator=generator) - 1.5
    return replace(batch, **values)


def by_turn(batch: TrainBatch, values_T: Tensor | None) -> list[float]:
    """Return the value of each trained token by episode, turn and place, found by hand."""
    assert values_T is not None and batch.turn_T is not None and batch.sample_N is not None
    values: dict[tuple[int, int], list[float]] = {}
    sample_T = torch.tensor(batch.sample_N).repeat_interleave(torch.tensor(batch.lens_N))
    for sample, turn, is_trained, value in zip(
        sample_T.tolist(), batch.turn_T.tolist(), batch.loss_mask_T.tolist(), values_T.tolist(),
        strict=True,
    ):  # fmt: skip
        if is_trained:
            values.setdefault((sample, turn), []).append(value)
    return [value for key in sorted(values) for value in values[key]]


def check_cuts(config: AlgorithmConfig, name: str) -> None:
    found = []
    for cut in CUTS:
        advantages_of = Advantages(config, {"right": 1.0, "form": 0.5})
        batch, _ = estimate(advantages_of, SCORES, make_samples(cut), make_batch(cut))
        found.append(by_turn(batch, getattr(batch, name)))
    assert any(value != 0 for value in found[0])
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6), config.advantage


@pytest.mark.parametrize("name", advantages.names)
def test_an_advantage_does_not_depend_on_rows(name: str) -> None:
    check_cuts(AlgorithmConfig(advantage=name, gamma=0.9, gae_lambda=0.8), "advantages_T")


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.names)
def test_a_kl_in_the_reward_does_not_depend_on_rows(estimator: str) -> None:
    kl = KLConfig(0.3, cast(Any, estimator), in_reward=True)
    for name in ("grpo", "reinforce_plus_plus"):
        check_cuts(AlgorithmConfig(advantage=name, gamma=0.9, kl=kl), "advantages_T")


def test_the_return_that_a_critic_learns_does_not_depend_on_rows() -> None:
    check_cuts(AlgorithmConfig(advantage="gae", gamma=0.9, gae_lambda=0.8), "returns_T")


@pytest.mark.parametrize("pick", [pick_between, pick_largest])
def test_the_tokens_held_back_do_not_depend_on_rows(pick: Pick) -> None:
    options = CovarianceConfig(share=0.1, low=-1.0, high=1.0)
    config = AlgorithmConfig(loss="clip_cov", covariance=options)
    found = []
    for cut in CUTS:
        batch = make_batch(cut)
        batch = replace(batch, advantages_T=batch.values_T)
        held_back, _ = with_held_back(batch, config, pick, seed=4)
        assert held_back.held_back_T is not None
        found.append(by_turn(batch, held_back.held_back_T.float()))
    assert found[0] == found[1] == found[2] and sum(found[0]) > 1


def test_cut_off_episodes_leave_the_loss_with_all_their_rows() -> None:
    trained = []
    for cut in CUTS:
        samples = [
            replace(sample, finish_reason="length") if n % 2 else sample
            for n, sample in enumerate(make_samples(cut))
        ]
        batch = make_batch(cut)
        left = mask_truncated(batch, samples)
        trained.append(by_turn(batch, left.loss_mask_T.float()))
    assert trained[0] == trained[1] == trained[2] and 0 < sum(trained[0]) < len(trained[0])
