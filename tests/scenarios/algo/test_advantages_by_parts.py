"""Advantages of parts of a step, in several stores, are those of the whole step in one process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.registry import advantages
from mcore_rl.batches.assembly import assemble, column_of, scatter
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import AlgorithmConfig, KLConfig
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.types import (
    Prompt,
    Sample,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TokenWork,
    TrainBatch,
)
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch
from tests.support.stored import Stores, make_sample, put_in_stores
from tests.support.turn_trees import random_tree, sample_of

PART_WEIGHTS = {"right": 1.0, "form": 0.5, "environment": 0.7}
IN_REWARD = KLConfig(0.3, "k3", in_reward=True, target=0.5, horizon=50)


@dataclass(frozen=True)
class Step:
    """A step's samples, here and in stores, and its batches with what an advantage reads."""

    stores: Stores
    samples: Sequence[Sample]
    rows: Sequence[StoredSample]
    scores: Scores
    here: TrainBatch
    there: StoredBatch


def make_groups(generator: random.Random, are_episodes: bool) -> list[list[Sample]]:
    """Return groups of 1 to 4 samples; a prompt that comes twice has one in each of two stores."""
    groups = []
    for index in (3, 8, 3, 5, 1, 8):
        prompt = Prompt(index, (1, 2), (), "unit", "7")
        size = generator.randint(1, 4)
        if are_episodes:
            trees = [random_tree(generator, generator.randint(1, 5)) for _ in range(size)]
            samples = [sample_of(tree, prompt, i) for i, tree in enumerate(trees)]
        else:
            samples = [make_sample(generator, prompt, i) for i in range(size)]  # some empty
        ends = [generator.choice(["stop", "length"]) for _ in samples]
        groups.append([replace(s, finish_reason=e) for s, e in zip(samples, ends, strict=True)])
    return groups


def make_scores(generator: random.Random, samples: Sequence[Sample]) -> Scores:
    """Return rewards of which many are equal; a prompt has one greedy reward."""

    def draw() -> list[float]:
        return [generator.choice([0.0, 0.1, 1.0, -2.0]) for _ in samples]

    parts = {name: draw() for name in PART_WEIGHTS}
    return Scores(draw(), parts, greedy_N=[sample.prompt.index / 10 for sample in samples])


def make_step(seed: int, name: str, are_episodes: bool, with_kl: bool) -> Step:
    """Return a step in any order, of which samples without an outcome are left out already."""
    generator = random.Random(seed)
    groups = make_groups(generator, are_episodes)
    stores, rows = put_in_stores(groups, num_stores=3)
    pairs = list(zip([sample for group in groups for sample in group], rows, strict=True))
    generator.shuffle(pairs)
    left = [pair for n, pair in enumerate(pairs) if n % 5 or not pair[0].response_len]
    samples, rows = [sample for sample, _ in left], [row for _, row in left]
    here, there = make_train_batch(samples), make_stored_batch(rows)
    needs = advantages.needs(name)
    fields = {"old_logprobs_T": True, "ref_logprobs_T": with_kl or needs.pairs}
    fields |= {"values_T": needs.critic, "sum_squares_T": needs.sum_squares}
    fields |= {"teacher_logprobs_T": needs.teacher}
    noise = torch.Generator().manual_seed(seed)
    values = {
        field: torch.rand(sum(here.lens_N), generator=noise) - 1.5
        for field, is_needed in fields.items()
        if is_needed
    }
    scatter(there, {column_of(field): value for field, value in values.items()}, stores.write)
    columns = {field: StoredColumn(column_of(field)) for field in values}
    scores = make_scores(generator, samples)
    return Step(stores, samples, rows, scores, replace(here, **values), replace(there, **columns))


def config_of(name: str, with_kl: bool) -> AlgorithmConfig:
    kl = IN_REWARD if with_kl else KLConfig()
    options: dict[str, Any] = {"bootstrap_truncated": True} if name == "gae" else {}
    return AlgorithmConfig(advantage=name, gamma=0.9, gae_lambda=0.8, kl=kl, **options)


def check(step: Step, config: AlgorithmConfig, part_tokens: int) -> list[int]:
    """Compare parts with the whole; return the tokens of each batch that a process held."""
    held: list[int] = []

    def on_tokens(works: Sequence[tuple[TokenWork, StoredBatch]]) -> list[tuple[StoredBatch, Any]]:
        held.extend(sum(batch.lens_N) for _, batch in works)
        return step.stores.apply(works)

    one = Advantages(config, PART_WEIGHTS, return_lambda=0.95)
    expected, metrics = estimate(one, step.scores, step.samples, step.here)
    other = Advantages(config, PART_WEIGHTS, return_lambda=0.95)
    has_teacher = step.there.teacher_logprobs_T is not None
    estimate_stored = StoredAdvantages(
        other, on_tokens, has_teacher=has_teacher, part_tokens=part_tokens
    )
    batch, same = estimate_stored(step.scores, step.rows, step.there)
    made = assemble(replace(batch, routed_experts_TLK=None), step.stores.read)
    assert made.advantages_T is not None and expected.advantages_T is not None
    assert made.advantages_T.dtype == torch.float32
    if one.are_normalized:
        torch.testing.assert_close(made.advantages_T, expected.advantages_T, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(made.advantages_T, expected.advantages_T)
    if expected.returns_T is not None:
        assert made.returns_T is not None and torch.equal(made.returns_T, expected.returns_T)
    assert same == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    assert other.state_dict() == pytest.approx(one.state_dict(), rel=1e-9)
    return held


@pytest.mark.parametrize("with_kl", [False, True], ids=["", "kl"])
@pytest.mark.parametrize("name", advantages.names)
@settings(max_examples=settings().max_examples // 4, deadline=None)
@given(
    seed=st.integers(0, 10_000), are_episodes=st.booleans(), part_tokens=st.sampled_from([1, 40])
)
def test_parts_give_what_the_whole_step_gives(
    name: str, with_kl: bool, seed: int, are_episodes: bool, part_tokens: int
) -> None:
    step = make_step(seed, name, are_episodes, with_kl)
    held = check(step, config_of(name, with_kl), part_tokens)
    by_prompt: dict[int, int] = {}
    for row in step.rows:
        own = sum(part.num_tokens for part in row.rows)
        by_prompt[row.prompt.index] = by_prompt.get(row.prompt.index, 0) + own
    assert max(held, default=0) <= max(part_tokens, *by_prompt.values())
    assert bool(held) == (with_kl or advantages.entry(name).sees == "groups" or name == "dpo")


def test_no_advantage_that_comes_with_the_project_sees_a_whole_step() -> None:
    sees = {name: advantages.entry(name).sees for name in advantages.names}
    assert "step" not in sees.values() and list(sees.values()).count("groups") >= 5
