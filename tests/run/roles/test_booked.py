"""The books of whole loops in one process: they balance whatever is killed, and name what is lost.

The loop, its roles and the ledger are the product's own; a table of logits is policy and engine.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.ledger.balance import Balance, count_trained, read_balance
from mcore_rl.logs.ledger.file import NAME, read_records
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.loops import training
from mcore_rl.loops.rl import train
from mcore_rl.loops.roles import Roles
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.booked import begin_books, keep_books
from mcore_rl.run.roles.local_trainer import LocalTrainer
from mcore_rl.run.rollouts import Rollouts
from mcore_rl.types import Prompt, StoredBatch, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.table_policy import MemoryLog, TablePolicy, make_prompts, repeats_the_prompt

NUM_PROMPTS = 10
DYNAMIC = {"dynamic_sampling": True, "oversampling": 1.5, "max_rounds": 3}


class Killed(BaseException):
    """Ends a launch as a kill would: nothing of it catches this."""


@dataclass
class Killer:
    """Counts the calls that reach a role, and kills the launch at one of them."""

    left: int = 10**9

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class KilledPolicy(TablePolicy):
    """Loses some samples, and dies when the killer says so."""

    killer = Killer()

    def generate(self, *args: Any, **options: Any) -> list[StoredSample]:
        self.killer.count()
        samples = super().generate(*args, **options)
        self.killer.count()
        return samples

    def train_step(self, batch: Any) -> Any:
        self.killer.count()
        return super().train_step(batch)

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        self.killer.count()
        return super().sync(version, probe)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        super().save(step, {**state, "weights": self.weights})

    def load(self, step: int) -> None:
        self.weights = self.served = self.saved[step]["weights"]
        self.version = WeightVersion(step)

    def note_lost(self, num_samples: int) -> None:
        """Let samples be lost."""


@dataclass
class Collectors:
    """Scores samples of a policy; the calls of `losing` lose the samples instead."""

    policy: TablePolicy
    losing: set[int] = field(default_factory=set)
    num_calls: int = 0

    async def score(self, samples: Sequence[StoredSample]) -> Scores:
        self.num_calls += 1
        if self.num_calls in self.losing:
            raise SamplesLostError("the collector died", [0])
        scores = repeats_the_prompt(self.policy.stores.samples(samples))
        is_bad = [s.prompt.index == 3 and s.sample_index == 1 for s in samples]
        rewards = [nan if bad else r for bad, r in zip(is_bad, scores.rewards_N, strict=True)]
        return replace(scores, rewards_N=rewards, errors=["odd" if bad else "" for bad in is_bad])

    async def samples(self, samples: Sequence[StoredSample]) -> Any:
        return self.policy.stores.samples(samples)


def watch(work: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await work

    return asyncio.run(wait())


@dataclass
class BookedRun:
    """A run whose launches go on from what the policy saved, as those of a run folder do."""

    folder: Path
    config: Config
    losing: set[int] = field(default_factory=set)
    saved: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    change: Callable[[Roles], Roles] = lambda roles: roles

    def launch(self, kill_after: int = 10**9) -> bool:
        """Run to the end; return False if the launch was killed."""
        config = self.config
        policy = KilledPolicy(make_policy_loss(config.algorithm), saved=self.saved)
        policy.killer = Killer(kill_after)
        stream: ShuffledStream[Prompt] = ShuffledStream(make_prompts(NUM_PROMPTS), seed=0)
        step = max(self.saved, default=0)
        if step:
            stream.load_state_dict(cast(Any, self.saved[step]["prompts"]))
            policy.load(step)
        ledger = RunLedger(self.folder / NAME)
        collectors: Any = Collectors(policy, self.losing)
        rollouts = Rollouts(
            cast(Any, None), collectors, watch, config.reward, has_teacher=False, ledger=ledger
        )
        roles = Roles(
            prompts=begin_books(config, stream, ledger, step),
            held_out=make_prompts(2),
            generator=policy,
            reward=rollouts.reward,
            advantages=StoredAdvantages(
                Advantages(config.algorithm), policy.stores.apply, has_teacher=False
            ),
            trainer=LocalTrainer(policy, policy.stores),
            weights=policy,
            log=MemoryLog(),
            on_tokens=policy.stores.apply,
        )
        try:
            with ledger:
                train(config, keep_books(self.change(roles), ledger), step)
        except Killed:
            return False
        return True

    def balance(self) -> Balance:
        return read_balance(self.folder)


def make_config(steps: int = 8, **rollout: Any) -> Config:
    sizes = {"prompts_per_step": 3, "samples_per_prompt": 2, "max_response_len": 3}
    return Config(
        run=RunConfig(steps=steps),
        rollout=RolloutConfig(**{**sizes, "kv_cache_len": 64, **rollout}),
        algorithm=AlgorithmConfig(),
        reward=RewardConfig(path="unused.py", max_failed_share=1.0),
        checkpoint=CheckpointConfig(every_steps=2),
        eval=EvalConfig(every_steps=4),
        train=TrainConfig(mini_batches=2, epochs=2),
    )


def test_the_books_of_a_run_balance(tmp_path: Path) -> None:
    """24 prompts of a data set of 10: two epochs, and four of a third; sample 1 of prompt 3 has no
    reward. The second scoring loses all groups, which are drawn again.
    """
    run = BookedRun(tmp_path, make_config(), losing={3})
    assert run.launch()
    balance = run.balance()
    assert balance.holds, balance.imbalances
    assert [(e.epoch, e.rows, e.drawn, e.trained) for e in balance.epochs] == [
        *((0, 10, 10, 10), (1, 10, 10, 10), (2, 10, 4, 4)),
    ]
    assert balance.left_out["no_reward"] in (2, 3)
    assert balance.samples["lost"] == 6
    assert balance.num_samples == 2 * 24 + 6 == sum(balance.samples.values())
    assert balance.ended == "finished" and balance.last_step == 8
    assert (balance.events["save"], balance.events["sync"]) == (4, 8)


@pytest.mark.parametrize(("seed", "options"), [(0, {}), (1, {}), (2, DYNAMIC)])
def test_a_run_that_is_killed_trains_on_the_same_prompts(
    seed: int, options: Mapping[str, Any], tmp_path: Path
) -> None:
    calm = BookedRun(tmp_path / "calm", make_config(6, **options))
    assert calm.launch()
    killed = BookedRun(tmp_path / "killed", make_config(6, **options))
    generator = random.Random(seed)
    for num_calls in (generator.randrange(30), generator.randrange(15)):
        assert not killed.launch(kill_after=num_calls)
        assert killed.balance().holds, killed.balance().imbalances
    assert killed.launch()
    for run in (calm, killed):
        assert run.balance().holds, run.balance().imbalances
    assert killed.balance().events["launch"] == 3
    assert calm.balance().events["launch"] == 1
    assert count_trained(calm.folder) == count_trained(killed.folder)


def test_dynamic_sampling_rejects_with_a_reason(tmp_path: Path) -> None:
    run = BookedRun(tmp_path, make_config(4, **DYNAMIC))
    assert run.launch()
    balance = run.balance()
    assert balance.holds, balance.imbalances
    rejected = {why for epoch in balance.epochs for why in epoch.rejected}
    assert rejected == {"equal_rewards", "surplus"}


class RankDies:
    """A recovery: the rank dies in step 2, and the state after step 3 is lost with a node."""

    def __init__(self) -> None:
        self._before: Callable[[], object] = lambda: None

    def train(self, step: int, work: Callable[[], Any]) -> tuple[Any, Mapping[str, float]]:
        if step == 2:
            with pytest.raises(RuntimeError, match="rank 1 died"):
                self._die(work)
        if step == 4:
            self._before()
        self._before = work
        return work(), {}

    def repeat(self, work: Callable[[], Any]) -> Any:
        return work()

    def save(self, step: int, work: Callable[[], None]) -> None:
        work()

    def note_done(self, step: int, state: Any) -> None: ...

    def _die(self, work: Callable[[], Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TablePolicy, "train_step", fail)
            work()


def fail(*given: Any) -> Any:
    raise RuntimeError("rank 1 died")


def test_a_recovery_repeats_steps_and_the_books_tell_so(tmp_path: Path) -> None:
    run = BookedRun(tmp_path, make_config(5))
    run.change = lambda roles: replace(roles, recovery=RankDies())
    assert run.launch()
    balance = run.balance()
    assert balance.holds, balance.imbalances
    counted = {kind: balance.events[kind] for kind in ("fault", "recovered", "repeated_steps")}
    assert counted == {"fault": 1, "recovered": 2, "repeated_steps": 1}
    faults = [r for r in read_records(tmp_path / NAME) if r["is"] == "fault"]
    assert faults == [
        {**faults[0], "work": "train", "error": "RuntimeError: rank 1 died"},
    ]


@pytest.mark.parametrize(
    ("plan", "imbalance"),
    [
        (lambda num: [list(range(num - 1))], "did not train it, and gives no reason"),
        (lambda num: [[*range(num), 0]], "2 times, more often than the recipe says"),
    ],
    ids=["forgets a sample", "trains a sample twice"],
)
def test_a_loop_that_cuts_its_batch_wrongly_is_found(
    plan: Callable[[int], list[list[int]]],
    imbalance: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault is planted in the plan of mini-batches."""
    monkeypatch.setattr(training, "plan_mini_batches", lambda num, *rest: plan(num))
    config = replace(make_config(steps=1), train=TrainConfig())
    run = BookedRun(tmp_path, config)
    assert run.launch()
    [told] = run.balance().imbalances
    assert imbalance in told and told.startswith("step 1 ")
