"""Only engines that agree with the trainer get requests, also at a run's start and on return."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mcore_rl.config import ParityCheckConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.engine_health import EngineHealth, EngineState, JoinedEngine
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.run.roles import weight_sync
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus
from mcore_rl.run.roles.parity_check import ParityCheck, make_probe
from mcore_rl.run.roles.parity_tolerance import MIN_TOKENS, NUM_TO_JUDGE, ParityTolerance
from mcore_rl.run.roles.weight_sync import MOST_SAME, EngineSync
from mcore_rl.types import Prompt, WeightVersion
from mcore_rl.weight_sync.controller.sync import SyncError
from tests.support.fake_sglang import FakeSGLang
from tests.support.scoring_engines import OneWeightLinks, OneWeightTrainer, ScoringEngine
from tests.support.stored import fetch_nothing

FIRST = WeightVersion(0)
PROBE = make_probe([Prompt(i, (3, 1 + i, 4), (), "unit", "") for i in range(2)], 2)


@dataclass
class Stage:
    """Two engines and a trainer; `seen` is what the next look at the engines finds."""

    loop: EventLoop
    engines: list[ScoringEngine]
    trainer: OneWeightTrainer = field(default_factory=lambda: OneWeightTrainer(0.25))
    seen: list[EngineState] = field(default_factory=list)
    server: FakeSGLang | None = None

    def __post_init__(self) -> None:
        self.urls = [engine.url for engine in self.engines]
        self.links = OneWeightLinks(self.trainer, self.engines)
        self.health = EngineHealth(self.urls)
        watched = self.loop.run
        gpus = SharedGpus(EngineMemory((), 1.0), watched)
        self.tolerance = ParityTolerance(ParityCheckConfig(), "float32")
        asked = self.trainer, ParityCheckConfig(), self.tolerance, 5.0, gpus.for_rollout
        parity_check = ParityCheck(*asked, None, fetch_nothing)
        self.num_steps = 0
        self.weights = EngineSync(
            *(self.links, parity_check, self.health, self._look, watched, gpus),
            count_steps=lambda: self.num_steps,
        )

    async def _look(self) -> None:
        self.health.note(self.seen)

    def revive(self) -> bool:
        return self.loop.run(self.weights.revive())

    def kill_all(self, *, come_back: bool) -> None:
        """Have all engines die; the next look finds them healthy again, or still gone."""
        self.health.note([EngineState(url, restarts=1, healthy=False) for url in self.urls])
        self.seen = [EngineState(url, restarts=1, healthy=come_back) for url in self.urls]
        for engine in self.engines:
            engine.weight = 99.0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(weight_sync, "DEATH_SHOWS_S", 0.0)
    monkeypatch.setattr(weight_sync, "RESTART_POLL_S", 0.01)
    loop = EventLoop()
    engines = [ScoringEngine(loop) for _ in range(2)]
    yield Stage(loop, engines)
    for engine in engines:
        loop.run(engine.runner.cleanup())
    loop.close()


def test_the_first_sync_admits_the_engines_that_agree(stage: Stage) -> None:
    metrics = stage.weights.sync_first(FIRST, PROBE)
    assert stage.health.serving == stage.urls
    assert metrics["sync/engines_failed"] == 0.0
    assert metrics["sync/parity_diff"] < 1e-6
    assert [engine.num_requests for engine in stage.engines] == [2, 2]


def test_the_trainer_scores_before_weights_are_sent(stage: Stage) -> None:
    """Engines with GPUs of their own go on decoding meanwhile."""
    order: list[str] = []
    score, sync = stage.trainer.compute_logprobs, stage.links.sync

    def scored(*args: Any) -> Any:
        order.append("trainer scores")
        return score(*args)

    async def sent(*args: Any) -> Any:
        order.append("weights are sent")
        return await sync(*args)

    stage.trainer.compute_logprobs = scored  # type: ignore[method-assign]
    stage.links.sync = sent  # type: ignore[method-assign]
    stage.weights.sync_first(FIRST, PROBE)
    assert order == ["trainer scores", "weights are sent"]
    assert [engine.num_requests for engine in stage.engines] == [2, 2]


def test_the_parity_check_learns_from_the_syncs_that_were_read_back(stage: Stage) -> None:
    long = make_probe([Prompt(0, tuple(range(250)), (), "unit", "")] * 8, 2)
    assert sum(long.lens_N) - len(long.lens_N) >= MIN_TOKENS
    for version in range(NUM_TO_JUDGE - 1):
        stage.weights.sync_first(WeightVersion(version), long)
    stage.links.verifies = False
    stage.weights.sync_first(WeightVersion(5), long)
    assert stage.tolerance.limits == {}
    stage.links.verifies = True
    stage.kill_all(come_back=True)
    assert stage.revive()
    assert stage.tolerance.limits != {}, "an engine that returned was read back, too"


def test_an_engine_corrupted_at_the_first_sync_gets_no_requests(stage: Stage) -> None:
    good, bad = stage.urls
    stage.links.corrupt = {bad}
    metrics = stage.weights.sync_first(FIRST, PROBE)
    assert stage.health.serving == [good]
    assert "claims weights 0" in stage.health.why_out(bad)
    assert "parity_check.tolerance" in stage.health.why_out(bad)
    assert metrics["sync/engines_failed"] == 1.0
    assert metrics["sync/parity_diff"] > 0.5


def test_a_first_sync_without_an_engine_that_agrees_fails(stage: Stage) -> None:
    stage.links.corrupt = set(stage.urls)
    with pytest.raises(SyncError, match=rf"{stage.urls[0]} claims .*; .*{stage.urls[1]} claims"):
        stage.weights.sync_first(FIRST, PROBE)


def test_an_engine_that_disagreed_serves_after_the_next_sync_if_it_agrees_then(
    stage: Stage,
) -> None:
    bad = stage.urls[1]
    stage.links.corrupt = {bad}
    stage.weights.sync_first(FIRST, PROBE)
    stage.links.corrupt = set()
    stage.trainer.weight = 0.75
    assert stage.weights.sync_first(WeightVersion(1), PROBE)["sync/engines_failed"] == 0.0
    assert stage.health.serving == stage.urls


def test_engines_that_return_serve_once_they_agree_with_the_last_check(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    stage.kill_all(come_back=True)
    assert stage.health.serving == []
    assert stage.revive()
    assert stage.health.serving == stage.urls
    assert [engine.num_requests for engine in stage.engines] == [4, 4]
    assert stage.trainer.num_passes == 1, "the trainer's log-probs of the last check are used again"


def test_an_engine_corrupted_on_its_return_gets_no_requests(stage: Stage) -> None:
    good, bad = stage.urls
    stage.weights.sync_first(FIRST, PROBE)
    stage.kill_all(come_back=True)
    stage.links.corrupt = {bad}
    assert stage.revive()
    assert stage.health.serving == [good]
    assert "parity_check.tolerance" in stage.health.why_out(bad)


def test_a_return_of_corrupted_engines_alone_ends_the_run(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    stage.kill_all(come_back=True)
    stage.links.corrupt = set(stage.urls)
    with pytest.raises(SyncError, match=r"parity_check\.tolerance"):
        stage.revive()
    assert stage.health.serving == []


def test_nothing_is_revived_while_an_engine_serves(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    first, second = stage.urls
    stage.health.note([EngineState(second, restarts=1)])
    assert stage.health.serving == [first]
    assert not stage.revive()


def test_an_engine_that_cannot_be_linked_is_left_out_with_its_reason(stage: Stage) -> None:
    first, second = stage.urls
    stage.links.unreachable = {second}
    stage.weights.sync_first(FIRST, PROBE)
    assert stage.health.serving == [first]
    assert stage.health.why_out(second) == f"engine {second} cannot be linked"
    stage.links.unreachable = {first, second}
    stage.kill_all(come_back=True)
    with pytest.raises(SyncError, match=rf"{first} cannot be linked; .*{second} cannot be linked"):
        stage.weights.sync_first(WeightVersion(1), PROBE)


def test_optimizer_steps_that_leave_the_bytes_the_same_are_warned_of(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    stage.trainer.weight = 0.75
    stage.num_steps = 2
    stage.weights.sync_first(WeightVersion(1), PROBE)
    assert not caplog.records
    stage.num_steps = 4
    stage.weights.sync_first(WeightVersion(2), PROBE)
    [record] = caplog.records
    assert "version 2 brought engines bit for bit the weights that they had" in record.getMessage()
    assert all(f"{url}: version 1" in record.getMessage() for url in stage.urls)


def test_the_same_bytes_without_an_optimizer_step_are_right(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic warms up for two steps; then the policy moves, and its version is sent twice."""
    shares = [
        stage.weights.sync_first(WeightVersion(version), PROBE).get("sync/changed_share")
        for version in range(3)
    ]
    assert shares == [None, 0.0, 0.0]
    stage.trainer.weight = 0.75
    stage.num_steps = 1
    for _ in range(2):
        stage.weights.sync_first(WeightVersion(3), PROBE)
    assert not caplog.records


def test_steps_count_from_the_version_that_the_engine_took_last(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights stay as they are over a step and a later sync without one: one warning, not two."""
    stage.weights.sync_first(FIRST, PROBE)
    stage.num_steps = 1
    stage.weights.sync_first(WeightVersion(1), PROBE)
    assert len(caplog.records) == 1
    stage.weights.sync_first(WeightVersion(2), PROBE)
    assert len(caplog.records) == 1


def train_and_sync(stage: Stage, version: int) -> None:
    stage.num_steps += 1
    stage.weights.sync_first(WeightVersion(version), PROBE)


def test_weights_that_stay_the_same_over_eight_syncs_of_a_policy_that_is_trained_end_the_run(
    stage: Stage,
) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    for version in range(1, MOST_SAME):
        train_and_sync(stage, version)
    stage.weights.sync_first(WeightVersion(MOST_SAME - 1), PROBE)  # sent again: no step, no count
    with pytest.raises(SyncError, match=r"version 8 is the 8th in a row .* the trainer sends old"):
        train_and_sync(stage, MOST_SAME)


def test_weights_that_change_now_and_then_end_no_run(stage: Stage) -> None:
    """As while the learning rate warms up, in bfloat16."""
    stage.weights.sync_first(FIRST, PROBE)
    for version in range(1, 4 * MOST_SAME):
        stage.trainer.weight += version % (MOST_SAME - 1) == 0
        train_and_sync(stage, version)


def test_an_engine_that_moves_is_waited_for_linked_anew_and_checked(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    first, second = stage.urls
    for url in stage.urls:
        stage.health.lose(url, "its node is gone")
    stage.health.num_coming = 1

    async def move() -> None:
        await asyncio.sleep(0.1)
        assert not waiting.done(), "it waits for the engine that is being started"
        stage.engines[1].weight = 99.0
        stage.health.leave(second)
        stage.health.join(JoinedEngine(EngineAddress(second, ""), home=0), "it is new")
        stage.health.num_coming = 0

    waiting = stage.loop.start(stage.weights.revive())
    stage.loop.run(move())
    assert waiting.result(20) and stage.health.serving == [second]
    assert stage.health.why_out(first) == "its node is gone"
    assert stage.links.linked == (first, second), "the old link was dropped"
    stage.health.leave(first)
    metrics = stage.weights.sync_first(WeightVersion(1), PROBE)
    assert metrics["sync/engines_failed"] == 0.0 and stage.links.linked == (second,)


class ComesInTurn:
    """The second engine, which is lost and starts when it has its GPU; see LostEngines."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._is_lost = True
        stage.health.num_coming = 1

    def list_living(self) -> list[str]:
        return [memory_of(self._stage).url]

    async def look(self) -> None: ...

    async def seat_lost(self) -> bool:
        return self._is_lost

    async def start_lost(self) -> list[str]:
        _, second = self._stage.urls
        self._is_lost = False
        self._stage.engines[1].weight = 99.0
        self._stage.health.leave(second)
        self._stage.health.join(JoinedEngine(EngineAddress(second, ""), home=0), "it is new")
        self._stage.health.num_coming = 0
        return []


def memory_of(stage: Stage) -> FakeSGLang:
    """Return the server that is asked for the memory of the stage's engines."""
    if stage.server is None:
        stage.server = FakeSGLang(stage.loop)
    return stage.server


def test_an_engine_on_shared_gpus_starts_again_within_the_sync_that_brings_it_weights(
    stage: Stage,
) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    for url in stage.urls:
        stage.health.lose(url, "its server died")
    urls = [memory_of(stage).url]
    memory = EngineMemory(urls, 1.0, engines=ComesInTurn(stage))
    stage.weights._memory = SharedGpus(memory, stage.loop.run)
    assert stage.revive()
    assert stage.health.serving == stage.urls[1:]
    assert stage.trainer.num_passes == 1


def test_engines_that_gave_up_their_weights_get_them_before_requests(stage: Stage) -> None:
    """As when ranks on their GPUs are replaced while a checkpoint is saved."""
    memory = EngineMemory([memory_of(stage).url], 1.0)
    stage.weights._memory = SharedGpus(memory, stage.loop.run)
    stage.weights.sync_first(FIRST, PROBE)
    stage.loop.run(stage.weights.prepare())
    assert [engine.num_requests for engine in stage.engines] == [2, 2], "they have them"
    stage.loop.run(memory.for_training())
    stage.weights.forget_links()
    for engine in stage.engines:
        engine.weight = 99.0
    stage.loop.run(stage.weights.prepare())
    assert [engine.num_requests for engine in stage.engines] == [4, 4]
    assert stage.health.serving == stage.urls and stage.engines[0].weight == stage.trainer.weight


def test_engines_that_come_or_go_have_not_failed(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    first, second = stage.urls
    sync = stage.links.sync

    async def sync_while_one_joins(*args: Any) -> Any:
        stage.health.join(JoinedEngine(EngineAddress("http://new", ""), home=0), "it is new")
        return await sync(*args)

    stage.links.sync = sync_while_one_joins  # type: ignore[method-assign]
    with stage.health.drain(second):
        metrics = stage.weights.sync_first(WeightVersion(1), PROBE)
    assert stage.health.serving == [first] and metrics["sync/engines_failed"] == 0.0
    stage.links.sync = sync  # type: ignore[method-assign]
    stage.links.unreachable = {"http://new"}
    metrics = stage.weights.sync_first(WeightVersion(2), PROBE)
    assert stage.health.serving == [first, second] and metrics["sync/engines_failed"] == 1.0


def test_nothing_is_waited_for_once_no_engine_is_coming(stage: Stage) -> None:
    stage.weights.sync_first(FIRST, PROBE)
    for url in stage.urls:
        stage.health.lose(url, "its node is gone")
    assert not stage.revive()
