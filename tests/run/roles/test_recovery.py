"""Which state models go back to, what is done again, and when a run ends nevertheless.

A model here is one number that each training doubles and adds its step to.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.answers import RankDiedError, RankError, RankFaultError, RankLostError
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process import signals
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.signals import (
    SIGNAL,
    OverdueStopError,
    allow_interruption,
    handle_stops,
    watch_for_stop_requests,
)
from mcore_rl.run.roles import recovery as recovery_module
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus
from mcore_rl.run.roles.recovery import RankRecovery, Recovered
from mcore_rl.types import FailedSaves
from mcore_rl.weight_sync.controller.sync import SyncError


class NumberModel:
    """Keeps its two newest numbers, as ranks keep their states."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.number = 1
        self.kept: dict[int, int] = {}
        self.num_restarts = 0
        self.dp_size = 4
        self.num_spare = 9
        """Replacements to be had; without one, a restart makes the model smaller."""
        self.larger_dp = 0
        """The size that there is room for again."""
        self.failing: list[tuple[str, str]] = []
        """(folder, reason) of saves that have failed when they are waited for."""
        self.num_finished = 0
        self._loss: RankLostError | None = None

    def train(self, step: int) -> int:
        self.check()
        self.number = 2 * self.number + step
        return self.number

    def die(self) -> None:
        self.lose(RankDiedError(f"{self.role} rank 0 died", [0]))

    def lose(self, loss: RankLostError) -> None:
        self._loss = loss
        self.number = -1

    def check(self) -> None:
        if self._loss is not None:
            raise self._loss

    def find_loss(self, wait_s: float) -> RankLostError | None:
        return self._loss

    def restart(self) -> None:
        self.num_restarts += 1
        self.num_spare -= 1
        self.dp_size -= self.num_spare < 0
        self._loss = None
        self.number = 1

    def find_larger(self) -> int:
        return max(self.dp_size, self.larger_dp)

    def grow(self) -> None:
        self.dp_size = self.find_larger()
        self.number = 1

    def finish_save(self) -> FailedSaves:
        self.check()
        self.num_finished += 1
        return tuple(self.failing)

    def keep_state(self, step: int) -> int:
        self.check()
        older = {kept: number for kept, number in self.kept.items() if kept == step - 1}
        self.kept = {**older, step: self.number}
        return 8

    def find_kept_steps(self) -> set[int]:
        return set(self.kept)

    def restore_state(self, step: int) -> None:
        self.check()
        self.number = self.kept[step]
        self.kept = {kept: number for kept, number in self.kept.items() if kept <= step}


class Steered:
    """A coefficient that each training changes."""

    value = 0

    def state_dict(self) -> Mapping[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.value = state["value"]


class Scene:
    """Trainer, critic and a coefficient, and what was asked of them."""

    def __init__(self, folder: Path, most: int = 3) -> None:
        self.models = trainer, critic = NumberModel("trainer"), NumberModel("critic")
        self.trainer, self.critic = trainer, critic
        self.steered = Steered()
        self.folder = RunFolder(folder)
        self.calls: list[str] = []
        self.done: list[Any] = []
        recovered = Recovered(
            models=self.models,
            gpus=SharedGpus(EngineMemory((), 0.0), lambda work: None),
            folder=self.folder,
            prepare=lambda role: self.calls.append(f"prepare {role}"),
            renew=lambda: self.calls.append("renew"),
            settle=lambda: None,
            forget_links=lambda: self.calls.append("forget links"),
            rewound=self.steered,
            note_done=self.done.append,
        )
        self.recovery = RankRecovery(recovered, most, start_step=0)

    def train(self, step: int, disturb: Callable[[], None] = lambda: None) -> tuple[int, int, int]:
        """Train both models; `disturb` is called between them."""

        def work() -> tuple[int, int, int]:
            self.steered.value += step
            trained = self.trainer.train(step)
            disturb()
            return trained, self.critic.train(step), self.steered.value

        return self.recovery.train(step, work)[0]


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "BACKOFF_S", 0.0)


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `action` the first time only."""
    left = [action]
    return lambda: left.pop()() if left else None


def undisturbed(folder: Path, num_steps: int) -> list[tuple[int, int, int]]:
    scene = Scene(folder)
    return [scene.train(step) for step in range(1, num_steps + 1)]


def test_both_models_go_back_when_one_is_lost(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path, 3)
    scene = Scene(tmp_path)
    assert scene.train(1) == wanted[0]
    assert scene.train(2, once(scene.critic.die)) == wanted[1]
    assert scene.train(3, once(scene.trainer.die)) == wanted[2]
    assert (scene.trainer.num_restarts, scene.critic.num_restarts) == (1, 1)
    again = [["forget links", f"prepare {role}", "renew"] for role in ("critic", "trainer")]
    assert scene.calls == [*again[0], *again[1]]


def test_a_model_that_becomes_smaller_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = undisturbed(tmp_path, 2)
    scene = Scene(tmp_path)
    scene.trainer.num_spare = 1

    def train(step: int) -> Mapping[str, float]:
        die = once(scene.trainer.die)

        def work() -> tuple[int, int, int]:
            scene.steered.value += step
            die()
            trained = scene.trainer.train(step), scene.critic.train(step), scene.steered.value
            assert trained == wanted[step - 1]
            return trained

        return scene.recovery.train(step, work)[1]

    assert train(1)["recovery/dp"] == 4.0
    assert "dp 4" not in caplog.text
    assert train(2)["recovery/dp"] == 3.0
    assert "trainer: dp 4 -> 3, as no node has room" in caplog.text


def test_a_model_grows_once_there_is_room_at_two_steps_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = undisturbed(tmp_path, 6)
    scene = Scene(tmp_path)
    scene.trainer.num_spare = 0
    sizes = []
    for step in range(1, 7):
        scene.trainer.larger_dp = 4 if step in (2, 4, 5, 6) else 0
        if step == 1:
            scene.trainer.die()
        assert scene.train(step) == wanted[step - 1]
        sizes.append(scene.trainer.dp_size)
    assert sizes == [3, 3, 3, 3, 4, 4]
    assert caplog.text.count("trainer: dp 3 -> 4 in ") == 1
    assert scene.trainer.num_restarts == 1 and scene.critic.num_restarts == 0
    built = ["forget links", "prepare trainer"]
    assert scene.calls == [*built, "renew", *built]


def test_a_model_does_not_grow_while_it_writes_a_checkpoint(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.trainer.larger_dp = 5
    scene.recovery.save(0, lambda: None)
    for step in (1, 2, 3):
        scene.train(step)
    assert scene.trainer.dp_size == 4
    scene.folder.failed_saves[0] = "no space"
    for step in (4, 5):
        scene.train(step)
    assert scene.trainer.dp_size == 5


def test_saves_that_never_pause_are_waited_for_once_so_that_a_model_grows(tmp_path: Path) -> None:
    """A save begins after each step, and is being written when the next step begins."""
    wanted = undisturbed(tmp_path, 6)
    scene = Scene(tmp_path)
    scene.trainer.larger_dp = 5
    sizes = []
    for step in range(1, 7):
        scene.trainer.failing = [(str(scene.folder.checkpoint(step - 1)), "no space")]
        assert scene.train(step) == wanted[step - 1]
        scene.recovery.save(step, lambda: None)
        sizes.append(scene.trainer.dp_size)
    assert sizes == [4, 4, 4, 4, 5, 5]
    assert (scene.trainer.num_finished, scene.critic.num_finished) == (1, 1)
    assert scene.folder.failed_saves == {4: "no space"}, "what the wait found is told"


def test_a_loss_while_a_model_grows_is_recovered(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path, 3)
    scene = Scene(tmp_path)
    scene.trainer.larger_dp = 5
    die = once(scene.trainer.die)
    grow = scene.trainer.grow

    def grow_and_die() -> None:
        grow()
        die()
        scene.trainer.check()

    scene.trainer.grow = grow_and_die  # pyright: ignore[reportAttributeAccessIssue]
    assert [scene.train(step) for step in (1, 2, 3)] == wanted
    assert scene.trainer.num_restarts == 1


def test_work_after_a_step_finds_its_state(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    [wanted] = undisturbed(tmp_path, 1)
    scene.train(1)
    die = once(scene.trainer.die)

    def sync() -> int:
        die()
        scene.trainer.check()
        return scene.trainer.number

    assert scene.recovery.repeat(sync) == wanted[0]


def test_a_step_whose_state_was_lost_with_its_node_is_trained_again(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path, 3)
    scene = Scene(tmp_path)
    scene.train(1)
    scene.recovery.repeat(lambda: None)
    scene.train(2)

    def lose_node() -> None:
        scene.trainer.die()
        del scene.trainer.kept[2]

    lose = once(lose_node)

    def sync() -> tuple[int, int, int]:
        lose()
        scene.trainer.check()
        return scene.trainer.number, scene.critic.number, scene.steered.value

    assert scene.recovery.repeat(sync) == wanted[1]
    assert scene.train(3) == wanted[2]


def test_what_failed_work_has_trained_is_taken_back(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path, 2)
    scene = Scene(tmp_path)
    scene.train(1)

    def fail() -> None:
        raise SamplesLostError("collector 0 died", [0])

    with pytest.raises(SamplesLostError):
        scene.train(2, fail)
    assert scene.recovery.take_back()
    scene.trainer.die()
    assert scene.recovery.take_back(), "ranks may be lost then, too"
    assert scene.train(2) == wanted[1]


def test_an_error_of_the_work_itself_is_raised(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    def fail() -> None:
        raise ValueError("the loss is not finite")

    with pytest.raises(ValueError, match="not finite"):
        scene.train(1, fail)
    assert scene.calls == []


def test_engines_that_met_a_loss_are_tried_again_once_ranks_are_back(tmp_path: Path) -> None:
    """The loss is recovered beside the work, in which an engine was to be brought weights."""
    scene = Scene(tmp_path)
    scene.train(1)
    error = SyncError("engine 0: trainer rank 1 died during describe")

    def lose_beside() -> None:
        scene.trainer.die()
        scene.recovery.recover(RankLostError("trainer rank 1 died"))
        raise error

    disturb = once(lose_beside)
    assert scene.recovery.repeat(lambda: disturb() or "sampled") == "sampled"
    assert scene.trainer.num_restarts == 1

    def fail() -> None:
        raise error

    with pytest.raises(SyncError, match="engine 0"):
        scene.recovery.repeat(fail)


def test_what_may_be_the_gpu_or_the_program_is_tried_once(tmp_path: Path) -> None:
    doubtful = RankFaultError("an illegal memory access was encountered", is_doubtful=True)
    wanted = undisturbed(tmp_path, 2)
    scene = Scene(tmp_path)
    for step in (1, 2):  # each after work that succeeded
        trained = scene.train(step, once(lambda: scene.critic.lose(doubtful)))
        assert trained == wanted[step - 1]
    with pytest.raises(RankError, match=r"illegal memory access.*\n.*of the program") as raised:
        scene.train(3, lambda: scene.critic.lose(doubtful))
    assert not isinstance(raised.value, RankLostError)
    assert scene.critic.num_restarts == 3


def test_the_wait_grows_with_recoveries_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(recovery_module, "BACKOFF_S", 2.0)
    monkeypatch.setattr(recovery_module.time, "sleep", waits.append)
    scene = Scene(tmp_path, most=20)
    deaths = [3, 1, 2]  # of a step
    for step, num_deaths in enumerate(deaths, 1):
        left = [scene.trainer.die] * num_deaths
        scene.train(step, lambda left=left: left.pop()() if left else None)
    assert waits == [0.0, 2.0, 4.0, 0.0, 0.0, 2.0]
    assert [recovery_module.backoff_s(n) for n in (6, 7, 50)] == [32.0, 60.0, 60.0]


def test_a_gpu_that_fails_again_and_again_costs_the_budget(tmp_path: Path) -> None:
    broken = RankFaultError("uncorrectable ECC error encountered", is_doubtful=False)
    scene = Scene(tmp_path, most=2)
    with pytest.raises(RankLostError, match=r"ECC error .*\nrun.recovery.restarts=2 .*spent"):
        scene.train(1, lambda: scene.critic.lose(broken))


def test_a_death_within_a_recovery_is_another_one(tmp_path: Path) -> None:
    [wanted] = undisturbed(tmp_path, 1)
    scene = Scene(tmp_path)
    dies_again = once(scene.critic.die)
    restart = scene.trainer.restart

    def restart_badly() -> None:
        restart()
        dies_again()

    scene.trainer.restart = restart_badly  # type: ignore[method-assign]
    assert scene.train(1, once(scene.trainer.die)) == wanted
    assert (scene.trainer.num_restarts, scene.critic.num_restarts) == (1, 1)


def test_a_save_that_failed_counts_as_begun_when_it_is_begun_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    failed: list[Mapping[int, str]] = []
    scene.train(1)
    scene.recovery.save(1, lambda: failed.append(dict(scene.folder.failed_saves)))
    scene.folder.failed_saves[1] = "no space"
    scene.train(2, once(scene.trainer.die))
    assert failed == [{}, {}] and scene.folder.failed_saves == {}


@pytest.fixture
def stop_watch() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    watch_for_stop_requests()
    yield
    watch_for_stop_requests()
    signal.signal(SIGNAL, before)


@pytest.mark.usefixtures("stop_watch")
@pytest.mark.parametrize("what", ["recover", "take back"])
def test_a_stop_that_becomes_overdue_in_a_recovery_leaves_a_state_to_save(
    tmp_path: Path, what: str
) -> None:
    [wanted] = undisturbed(tmp_path, 1)
    scene = Scene(tmp_path)
    scene.train(1)
    restart = scene.trainer.restart

    def restart_slowly() -> None:
        restart()
        until_s = time.monotonic() + 20.0
        while not signals._stop.is_told and time.monotonic() < until_s:
            time.sleep(0.01)

    scene.trainer.restart = restart_slowly  # type: ignore[method-assign]
    scene.trainer.die()
    with handle_stops(0.2), pytest.raises(OverdueStopError):
        os.kill(os.getpid(), SIGNAL)
        with allow_interruption():
            if what == "recover":
                scene.recovery.recover(RankDiedError("trainer rank 0 died", [0]))
            else:
                scene.recovery.take_back()
    assert (scene.trainer.number, scene.critic.number) == wanted[:2]
    saved: list[int] = []
    scene.recovery.save(1, lambda: saved.append(scene.trainer.train(2)))
    assert saved and scene.trainer.num_restarts == 1


def test_recoveries_are_bounded_and_the_reason_is_told(tmp_path: Path) -> None:
    scene = Scene(tmp_path, most=2)
    with pytest.raises(
        RankLostError, match=r"trainer rank 0 died\nrun.recovery.restarts=2 .*spent"
    ):
        scene.train(1, scene.trainer.die)
    assert scene.trainer.num_restarts == 2


def test_a_save_that_was_begun_is_begun_again_and_only_with_its_state(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    saved: list[tuple[int, int]] = []
    scene.train(1)
    scene.recovery.save(1, lambda: saved.append((1, scene.trainer.number)))
    before = scene.trainer.number
    scene.train(2, once(scene.trainer.die))
    assert saved == [(1, before), (1, before)]
    scene.recovery.repeat(once(scene.trainer.die))
    scene.train(3)
    assert saved == [(1, before), (1, before)], "memory has no state of step 1 any more"
