"""The books of runs that sample beside training: lost, stale and replaced groups, and resumes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import RewardConfig
from mcore_rl.logs.ledger.balance import count_trained, read_balance
from mcore_rl.logs.ledger.file import NAME, read_records
from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.rollout import client as client_module
from mcore_rl.run.roles.background import BackgroundSampler
from mcore_rl.run.roles.booked import BookedPrompts
from mcore_rl.run.roles.kept_samples import KeptSamples
from mcore_rl.run.rollouts import Rollouts
from mcore_rl.types import StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.background_sampling import PROMPTS, Sampler, score_by_index
from tests.support.fake_sglang import loop_with_quick_retries

ONE_STEP_OFF = {"mode": "one_step_off"}
ASYNC = {"mode": "async", "max_staleness": 1, "partial": "wait"}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


class Collectors:
    """Scores samples; the calls of `losing` lose them instead."""

    def __init__(self, losing: Sequence[int] = ()) -> None:
        self._losing = losing
        self._num_calls = 0

    async def score(self, samples: Sequence[StoredSample]) -> Scores:
        self._num_calls += 1
        if self._num_calls in self._losing:
            raise SamplesLostError("the collector died", [0])
        return replace(await score_by_index(samples), errors=[""] * len(samples))


class BookedSampler:
    """A launch: a background sampler on a fake engine, and a loop that says that it trains."""

    def __init__(
        self,
        folder: Path,
        loop: EventLoop,
        options: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        step: int = 0,
        losing: Sequence[int] = (),
        kept: KeptSamples | None = None,
    ) -> None:
        self.ledger = RunLedger(folder / NAME)
        self.step = step
        collectors: Any = Collectors(losing)
        nobody: Any = None
        self.prompts: BookedPrompts
        rollouts = Rollouts(
            nobody, collectors, loop.run, RewardConfig(), has_teacher=False, ledger=self.ledger
        )

        def make(drawing: Any, seed: int, _: Any, stream: Any, *rest: Any) -> BackgroundSampler:
            if state is not None:
                stream.load_state_dict(state)
            place, bound = stream.get_place(), drawing.rollout.staleness_bound
            mode, replaces = drawing.rollout.mode, drawing.rollout.dynamic_sampling
            how = mode, bound, 2, (1, 1), replaces
            self.ledger.begin(LaunchEntry(step, place.next, place.again, place.rows, seed, *how))
            self.prompts = BookedPrompts(stream, self.ledger)
            given = WeightVersion(step), self.prompts, *rest
            return BackgroundSampler(drawing, seed, *given, ledger=self.ledger, kept=kept)

        self.sampler = Sampler(
            cast(Any, make), loop, score=rollouts.score, **{"kv_cache_len": 64, **options}
        )
        self.sampler.engine.version = step

    def train(self, num_steps: int, then: Callable[[int], None] = lambda step: None) -> None:
        """Take the groups of so many steps and say that they were trained."""
        for _ in range(num_steps):
            version = WeightVersion(self.step)
            samples, scores, _ = self.sampler.background.take(version)
            self.step += 1
            self.ledger.begin_training()
            self.ledger.note_batch(make_stored_batch(samples, version))
            self.ledger.end_training(self.step)
            self.sampler.background.pause_for_sync()
            self.sampler.engine.version = self.step
            self.ledger.note("sync", version=self.step)
            self.sampler.background.resume(WeightVersion(self.step))
            self.ledger.note_step(self.step, samples, scores, samples)
            then(self.step)


@pytest.mark.parametrize(
    ("options", "losing", "given_up"),
    [
        (ONE_STEP_OFF, (), set()),
        (ONE_STEP_OFF, (2, 3, 6), {"lost"}),
        (ASYNC, (), set()),
        ({**ASYNC, "dynamic_sampling": True}, (4,), {"lost", "rejected: equal_rewards"}),
        ({**ONE_STEP_OFF, "dynamic_sampling": True}, (), {"rejected: equal_rewards"}),
    ],
)
def test_the_books_balance(
    options: Mapping[str, Any],
    losing: Sequence[int],
    given_up: set[str],
    loop: EventLoop,
    tmp_path: Path,
) -> None:
    launch = BookedSampler(tmp_path, loop, options, losing=losing)
    with launch.ledger, launch.sampler.background:
        launch.train(6)
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances
    assert balance.last_step == 6 and balance.samples["trained"] == 6 * 4
    assert given_up == set(balance.samples) - {"trained", "under way"}
    assert sum(epoch.trained for epoch in balance.epochs) == 12


def test_failed_and_stale_groups_are_given_up_with_their_reasons(
    loop: EventLoop, tmp_path: Path
) -> None:
    options = {**ASYNC, "stale": "drop"}
    launch = BookedSampler(tmp_path, loop, options)
    sampler = launch.sampler
    sampler.engine.answer = lambda body: (503, "down")
    with launch.ledger, sampler.background:
        launch.train(1)
        sampler.wait_until_full()
        launch.step = 3
        for version in (2, 3):  # two steps whose samples nobody took
            sampler.move_to(version)
            launch.ledger.note("sync", version=version)
        launch.step = 3
        sampler.background.take(WeightVersion(3))
    records = list(read_records(tmp_path / NAME))
    assert {r["why"] for r in records if r["is"] == "given_up"} == {"aborted", "dropped_stale"}
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances
    assert balance.samples["dropped_stale"] >= 4


@pytest.mark.parametrize("options", [ONE_STEP_OFF, {**ASYNC, "dynamic_sampling": True}])
def test_a_launch_draws_again_what_the_checkpoint_had_open(
    options: Mapping[str, Any], loop: EventLoop, tmp_path: Path
) -> None:
    states: dict[int, Any] = {}
    first = BookedSampler(tmp_path, loop, options)

    def save(step: int) -> None:
        if step == 2:
            states[step] = first.prompts.state_dict()
            first.ledger.note_save(step)

    with first.sampler.background:
        first.train(4, save)
    first.ledger.close(RuntimeError("killed"))
    second = BookedSampler(tmp_path, loop, options, states[2], 2)
    with second.ledger, second.sampler.background:
        second.train(4)
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances
    assert balance.events["voided_steps"] == 2 and balance.last_step == 6
    assert balance.samples["void: trained"] == 8
    assert balance.ended == "finished"
    trained = count_trained(tmp_path)
    assert set(trained.values()) == {1} and len(trained) == 12
    assert max(prompt for _, _, prompt in trained) < len(PROMPTS)


def test_a_prompt_that_the_sampler_forgets_is_named(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group is given up, and nothing begins it again."""
    launch = BookedSampler(tmp_path, loop, ONE_STEP_OFF, losing=(2,))
    background = launch.sampler.background
    requeue = background._requeue

    def forget(*args: Any, **options: Any) -> None:
        requeue(*args, **options)
        background._requeued.clear()

    monkeypatch.setattr(background, "_requeue", forget)
    with launch.ledger, background:
        launch.train(3)
    balance = read_balance(tmp_path)
    assert balance.num_imbalances == 1
    assert "is lost: it was given up (lost)" in balance.imbalances[0]
