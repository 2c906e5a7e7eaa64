"""Advantages of stored samples are those of the same samples held here."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algo import lookup
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import register_user_file
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.registry import advantages
from mcore_rl.batches.assembly import assemble, scatter
from mcore_rl.batches.kept_rows import TEACHER_LOGPROBS
from mcore_rl.batches.stored_batch import make_stored_batch, without_truncated
from mcore_rl.config import AlgorithmConfig, KLConfig
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.types import StoredBatch, StoredColumn
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch, mask_truncated
from tests.support.stored import make_stored

BY_SAMPLE = [
    name
    for name in advantages.names
    if advantages.entry(name).sees == "samples" and not advantages.needs(name).old_logprobs
]


def untouched(works: Sequence[Any]) -> list[tuple[StoredBatch, Any]]:
    raise AssertionError("tokens are not needed")


def scores_of(number: int) -> Scores:
    return Scores([float(i * i % 5) for i in range(number)])


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_rewards_and_lengths_suffice_for_advantages_by_sample(name: str) -> None:
    stores, samples, rows = make_stored(seed=2)
    parts = {"right": [float(i % 2) for i in range(len(rows))]}
    scores = replace(scores_of(len(rows)), parts=parts)
    config = AlgorithmConfig(advantage=name)
    estimator = Advantages(config, {"right": 0.5})
    expected, _ = estimate(estimator, scores, samples, make_train_batch(samples))
    estimate_stored = StoredAdvantages(estimator, untouched, has_teacher=False)
    batch, metrics = estimate_stored(scores, rows, make_stored_batch(rows))
    made = assemble(batch, stores.read)
    assert made.advantages_T is not None and expected.advantages_T is not None
    assert torch.equal(made.advantages_T, expected.advantages_T) and metrics == {}
    assert len(BY_SAMPLE) >= 8


@pytest.fixture
def own_file_forgotten() -> Iterator[None]:
    """Leave nothing behind of what a user's file registers."""
    names = advantages.names
    yield
    advantages.keep_only(names)
    lookup._files.clear()
    register_user_file.cache_clear()


@pytest.mark.usefixtures("own_file_forgotten")
def test_a_users_advantage_needs_its_file_in_the_controller_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from mcore_rl.algo.registry import Needs, advantages\n"
        "@advantages.register('over_greedy', Needs(greedy_baseline=True), sees='samples')\n"
        "def over_greedy(outcomes, config):\n"
        "    return outcomes.spread(outcomes.rewards_N - outcomes.greedy_N)\n"
        "@advantages.register('forgets_to_spread', sees='samples')\n"
        "def forgets_to_spread(outcomes, config):\n"
        "    return outcomes.rewards_N[:1]\n"
    )
    _, _, rows = make_stored(seed=6)
    scores = replace(scores_of(len(rows)), greedy_N=[1.0] * len(rows))
    config = AlgorithmConfig(path=str(file), advantage="over_greedy")
    there = tmp_path / "there.pickle"
    there.write_bytes(pickle.dumps((Advantages(config), scores, rows)))
    wrong = Advantages(replace(config, advantage="forgets_to_spread"))
    file.unlink()
    code = (
        "import pickle, sys; a, scores, rows = pickle.load(open(sys.argv[1], 'rb'));"
        " print(a.compute_from_samples(scores, rows).tolist())"
    )
    command = [sys.executable, "-c", code, str(there)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [reward - 1 for reward in scores.rewards_N]
    with pytest.raises(ValueError, match=r"forgets_to_spread returned shape \(1,\) for 15 samples"):
        wrong.compute_from_samples(scores, rows)


def test_a_kl_in_the_reward_is_computed_where_tokens_are_and_steers_its_coefficient() -> None:
    stores, samples, rows = make_stored(seed=3)
    scores = scores_of(len(rows))
    config = AlgorithmConfig(kl=KLConfig(coef=0.1, in_reward=True, target=0.01, horizon=100))
    here = make_train_batch(samples)
    values = [torch.randn(sum(here.lens_N)) for _ in range(2)]
    there = make_stored_batch(rows)
    names = ("old_logprobs", "ref_logprobs")
    scatter(there, dict(zip(names, values, strict=True)), stores.write)
    there = replace(there, **{f"{name}_T": StoredColumn(name) for name in names})
    one = Advantages(config)
    here = replace(here, old_logprobs_T=values[0], ref_logprobs_T=values[1])
    expected, metrics = estimate(one, scores, samples, here)
    other = StoredAdvantages(Advantages(config), stores.apply, has_teacher=False)
    batch, same = other(scores, rows, there)
    assert batch.advantages_N is not None and same == pytest.approx(metrics)
    made = assemble(batch, stores.read).advantages_T
    assert made is not None and expected.advantages_T is not None
    assert torch.equal(made, expected.advantages_T)
    assert other.state_dict() == pytest.approx(one.state_dict()) != {"kl_coef": 0.1}
    other.load_state_dict({"kl_coef": 0.5})
    assert other.state_dict() == {"kl_coef": 0.5}


ENDS = ["length", "stop", "stop"] * 5


@pytest.mark.parametrize("bootstraps", [False, True])
def test_values_give_returns_beside_advantages(bootstraps: bool) -> None:
    stores, samples, rows = make_stored(seed=4)
    scores = scores_of(len(rows))
    here = make_train_batch(samples)
    values_T = torch.randn(sum(here.lens_N))
    there = make_stored_batch(rows)
    scatter(there, {"values": values_T}, stores.write)
    config = AlgorithmConfig(advantage="gae", bootstrap_truncated=bootstraps)
    samples = [replace(s, finish_reason=e) for s, e in zip(samples, ENDS, strict=True)]
    rows = [replace(row, finish_reason=end) for row, end in zip(rows, ENDS, strict=True)]
    expected, metrics = estimate(
        Advantages(config), scores, samples, replace(here, values_T=values_T)
    )
    estimate_stored = StoredAdvantages(Advantages(config), stores.apply, has_teacher=False)
    batch, same = estimate_stored(scores, rows, replace(there, values_T=StoredColumn("values")))
    made = assemble(batch, stores.read)
    assert made.returns_T is not None and expected.returns_T is not None
    assert torch.equal(made.returns_T, expected.returns_T)
    assert same == pytest.approx(metrics)


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_plus_plus"])
def test_stored_responses_that_are_cut_off_count_for_others_and_carry_no_loss(name: str) -> None:
    """DAPO, section 3.4: the mask loses them after advantages are computed with them."""
    stores, samples, rows = make_stored(seed=8)
    samples = [replace(s, finish_reason=e) for s, e in zip(samples, ENDS, strict=True)]
    rows = [replace(row, finish_reason=end) for row, end in zip(rows, ENDS, strict=True)]
    scores = scores_of(len(rows))
    config = AlgorithmConfig(advantage=name, loss="policy_gradient", filter_overlong=True)
    estimate_stored = StoredAdvantages(Advantages(config), stores.apply, has_teacher=False)
    batch, _ = estimate_stored(scores, rows, make_stored_batch(rows))
    batch = without_truncated(batch, rows)
    made = assemble(batch, stores.read)
    here = make_train_batch(samples)
    expected, _ = estimate(Advantages(config), scores, samples, here)
    mask_T = mask_truncated(here, samples).loss_mask_T
    assert torch.equal(made.loss_mask_T, mask_T) and 0 < mask_T.sum() < here.loss_mask_T.sum()
    assert made.advantages_T is not None and expected.advantages_T is not None
    torch.testing.assert_close(made.advantages_T[mask_T], expected.advantages_T[mask_T])


def test_a_teachers_log_probs_are_read_from_their_column() -> None:
    stores, samples, rows = make_stored(seed=5)
    scores = scores_of(len(rows))
    here = make_train_batch(samples)
    old_T, teacher_T = torch.randn(sum(here.lens_N)), torch.randn(sum(here.lens_N))
    there = make_stored_batch(rows)
    scatter(there, {"old_logprobs": old_T, TEACHER_LOGPROBS: teacher_T}, stores.write)
    config = AlgorithmConfig(advantage="distillation", reward_coef=0.5)
    here = replace(here, old_logprobs_T=old_T, teacher_logprobs_T=teacher_T)
    expected, metrics = estimate(Advantages(config), scores, samples, here)
    estimate_stored = StoredAdvantages(Advantages(config), stores.apply, has_teacher=True)
    there = replace(there, old_logprobs_T=StoredColumn("old_logprobs"))
    batch, same = estimate_stored(scores, rows, there)
    made = assemble(batch, stores.read).advantages_T
    assert made is not None and expected.advantages_T is not None
    assert torch.equal(made, expected.advantages_T) and same == pytest.approx(metrics)
    assert "kl/teacher" in metrics


def test_a_users_advantage_that_sees_the_step_gets_it_whole(own_file_forgotten: None) -> None:
    """Its result for a token depends on all others, and is not changed afterwards."""

    @advantages.register("rank_of_length")
    def rank_of_length(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
        return outcomes.lens_N.argsort().argsort().repeat_interleave(outcomes.lens_N)

    stores, samples, rows = make_stored(seed=7)
    held: list[int] = []

    def on_tokens(works: Sequence[Any]) -> list[tuple[StoredBatch, Any]]:
        held.extend(len(batch.lens_N) for _, batch in works)
        return stores.apply(works)

    config = AlgorithmConfig(advantage="rank_of_length")
    scores = scores_of(len(rows))
    here = make_train_batch(samples)
    expected, _ = estimate(Advantages(config), scores, samples, here)
    estimate_stored = StoredAdvantages(
        Advantages(config), on_tokens, has_teacher=False, part_tokens=1
    )
    batch, _ = estimate_stored(scores, rows, make_stored_batch(rows))
    made = assemble(batch, stores.read).advantages_T
    assert made is not None and expected.advantages_T is not None and made.dtype == torch.float32
    assert torch.equal(made, expected.advantages_T) and made.max() > 8
    assert held == [len(here.lens_N)]
