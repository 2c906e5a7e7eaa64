"""A controller that takes the place of a lost one goes on from what ranks kept, or a checkpoint."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.process import relaunch
from mcore_rl.process.kept_memory import KeptMemory
from mcore_rl.run.kept_start import Origin, hold_positions


@dataclass
class Model:
    """Ranks that a lost controller had: the steps that all of them kept, and what is asked."""

    role: str
    kept: set[int]
    log: list[tuple[str, object]] = field(default_factory=list)

    def find_earlier_steps(self) -> set[int]:
        return self.kept

    def start_over(self) -> None:
        self.log.append((self.role, "starts over"))

    def restore_state(self, step: int) -> None:
        self.log.append((self.role, step))


@dataclass
class Stream:
    position: int = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list whose last item a process of this kind would find."""
    held: list[bytes] = []
    monkeypatch.setattr(relaunch, "hold_state", held.append)
    monkeypatch.setattr(relaunch, "read_state", lambda: held[-1] if held else None)
    hold({"step": 7, "prompts": {"position": 28}})
    return held


@dataclass
class Keepers:
    outlive_controllers: bool = True


class Processes:
    def __init__(self) -> None:
        self.noted: list[bytes] = []

    def note_done(self, positions: bytes, keepers: Keepers) -> None:
        self.noted.append(positions)


def hold(state: Mapping[str, Any], *, outlive_controllers: bool = True) -> list[bytes]:
    """Hold positions; return what the run's processes were told of them."""
    processes: Any = Processes()
    keepers: Any = Keepers(outlive_controllers)
    hold_positions(processes, keepers, state)
    return processes.noted


NEWEST = Path("checkpoints/step_000005")


def test_a_later_state_in_memory_is_gone_on_from(content: list[bytes]) -> None:
    log: list[tuple[str, object]] = []
    models: Any = [Model("trainer", {6, 7}, log), Model("critic", {7, 8}, log)]
    stream = Stream()
    origin = Origin.find(NEWEST, 5, None)
    assert origin.find_held(models) == 7
    origin.restore(models, {"prompts": stream}, lambda role: log.append((role, "on its GPU")))
    assert stream.position == 28
    assert log == [
        ("trainer", "on its GPU"),
        ("trainer", 7),
        ("critic", "on its GPU"),
        ("critic", 7),
    ]


def test_memory_is_preferred_to_a_checkpoint_unless_that_is_newer(content: list[bytes]) -> None:
    assert Origin.find(NEWEST, 7, None).find_held([]) == 7
    origin = Origin.find(NEWEST, 8, None)
    assert origin == Origin(NEWEST) and origin.find_held([]) == 0


def test_positions_that_outlived_their_controller_count_first(content: list[bytes]) -> None:
    [positions] = hold({"step": 9}, outlive_controllers=False)
    assert len(content) == 1, "their command does not hold them, too"
    assert Origin.find(NEWEST, 5, positions).find_held([]) == 9


def test_a_state_that_a_model_has_lost_counts_for_none_of_them(
    content: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[KeptMemory] = []
    monkeypatch.setattr(KeptMemory, "close", lambda memory: dropped.append(memory))
    models: Any = [Model("trainer", {6, 7}), Model("critic", {6})]
    assert Origin.find(NEWEST, 5, None).find_held(models) == 0
    assert [model.log for model in models] == [
        [("trainer", "starts over")],
        [("critic", "starts over")],
    ]
    assert len(dropped) == 1, "copies of another time could count later"


def test_what_is_held_must_be_plain(content: list[bytes]) -> None:
    content.append(pickle.dumps(print))
    with pytest.raises(ValueError, match="memory"):
        Origin.find(NEWEST, 5, None)
