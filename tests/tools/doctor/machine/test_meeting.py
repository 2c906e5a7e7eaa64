"""Nodes that meet in a folder: exchange, deadlines that name nodes, files of earlier meetings."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.doctor.machine.meeting import (
    Meeting,
    MeetingOverError,
    MissingNodesError,
    NodePlace,
)

Act = Callable[[Meeting], Any]


def meet(folder: Path, size: int, act: Act, timeout_s: float = 5.0) -> list[Any]:
    """Let `size` nodes meet, each in a thread; return what `act` returned in each."""

    def run(rank: int) -> Any:
        with Meeting(folder, NodePlace(rank, size, f"n{rank}"), timeout_s) as meeting:
            return act(meeting)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def end(meeting: Meeting, failed: bool) -> bool:
    if meeting.place.rank == 0:
        meeting.end(failed)
        return failed
    return meeting.read_end()


@pytest.mark.parametrize("failed", [False, True])
def test_all_get_what_all_gave_and_the_end_and_leave_nothing(tmp_path: Path, failed: bool) -> None:
    def act(meeting: Meeting) -> Any:
        told = meeting.exchange("facts", {"rank": meeting.place.rank})
        return told, end(meeting, failed), meeting.token

    told = meet(tmp_path / "new", 3, act)
    facts = [{"rank": rank} for rank in range(3)]
    assert [(one, over) for one, over, _ in told] == [(facts, failed)] * 3
    assert len({token for *_, token in told}) == 1
    assert list((tmp_path / "new").iterdir()) == []


def test_files_of_an_earlier_meeting_are_not_taken_for_this_one(tmp_path: Path) -> None:
    """Node 1 of an earlier meeting was killed, and so was its node 0."""
    stale = {
        "hello_1": "old",
        "ack_1": ["x", "old"],
        "session": {"id": "x", "numbers": {"1": "old"}},
    }
    for name, value in stale.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))

    def act(meeting: Meeting) -> Any:
        time.sleep(0.1 * meeting.place.rank)
        return meeting.exchange("facts", meeting.place.rank), end(meeting, False)

    assert meet(tmp_path, 2, act) == [([0, 1], False)] * 2


def test_nodes_that_do_not_come_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingNodesError, match=r"node 1, node 2 of 3 did not come to .* in 0\.2 s"),
        Meeting(tmp_path, NodePlace(0, 3, "a"), 0.2),
    ):
        pass
    with (
        pytest.raises(MissingNodesError, match="node 0 did not come to "),
        Meeting(tmp_path, NodePlace(1, 3, "b"), 0.2),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_drops_out_is_named_by_all_others(tmp_path: Path) -> None:
    def act(meeting: Meeting) -> str:
        meeting.names = ["a", "b", "c"]
        if meeting.place.rank == 2:
            return ""
        with pytest.raises(MissingNodesError) as error:
            meeting.exchange("facts", 0, timeout_s=0.3)
        return str(error.value)

    first, second, _ = meet(tmp_path, 3, act)
    assert first.startswith("node 2 (c) of 3 did not put facts into ")
    assert second.startswith("node 2 (c) of 3 did not put facts into ")


def test_a_node_learns_that_node_0_gave_up(tmp_path: Path) -> None:
    def act(meeting: Meeting) -> bool:
        if meeting.place.rank == 0:
            return end(meeting, True)
        with pytest.raises(MeetingOverError, match="ended the meeting before facts"):
            meeting.exchange("facts", 0)
        return end(meeting, True)

    began_s = time.monotonic()
    assert meet(tmp_path, 2, act) == [True, True]
    assert time.monotonic() - began_s < 4
