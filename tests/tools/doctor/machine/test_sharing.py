"""A shared folder: calls and answers, a lock across processes, and what is said of both."""

import multiprocessing as mp
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.clock import measure_offset
from mcore_rl.tools.doctor.machine.meeting import Meeting, NodePlace
from mcore_rl.tools.doctor.machine.sharing import (
    ROUNDS,
    SharedView,
    call_and_answer,
    judge_sharing,
    try_lock,
)

AHEAD_S = 7.0


def end(meeting: Meeting) -> None:
    if meeting.place.rank == 0:
        meeting.end(failed=False)
    else:
        meeting.read_end()


def test_answers_come_with_times_and_the_same_content(tmp_path: Path) -> None:
    def run(rank: int) -> SharedView:
        clock = (lambda: time.time() + AHEAD_S) if rank == 2 else time.time
        with Meeting(tmp_path, NodePlace(rank, 3, f"n{rank}"), 10.0) as meeting:
            view = call_and_answer(meeting, clock)
            end(meeting)
            return view

    with ThreadPoolExecutor(3) as pool:
        view, *others = pool.map(run, range(3))
    assert view.wrong == {}
    assert [len(view.seconds[rank]) for rank in (1, 2)] == [ROUNDS, ROUNDS]
    assert measure_offset(view.samples[1]).seconds == pytest.approx(0, abs=0.5)
    assert measure_offset(view.samples[2]).seconds == pytest.approx(AHEAD_S, abs=0.5)
    assert others == [SharedView({}, {}, {})] * 2


def lock_in(folder: Path, rank: int, answers) -> None:
    with Meeting(folder, NodePlace(rank, 2, f"n{rank}"), 20.0) as meeting:
        answers.put(try_lock(meeting))
        end(meeting)


def test_a_lock_is_refused_to_another_process(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    answers = context.Queue()
    nodes = [context.Process(target=lock_in, args=(tmp_path, r, answers)) for r in range(2)]
    for node in nodes:
        node.start()
    assert [answers.get(timeout=20) for _ in nodes] == [[True, True]] * 2
    for node in nodes:
        node.join(20)


def test_late_answers_wrong_content_and_a_lock_for_two_are_found() -> None:
    view = SharedView({1: [0.1, 0.2], 2: [9.0], 3: [0.1]}, {}, {3: "it read something else"})
    found = judge_sharing(view, [True, True, True, False], ["a", "b", "c", "d"])
    assert [(f.node, f.check, f.outcome) for f in found] == [
        ("b", "shared folder", "ok"),
        ("b", "shared lock", "ok"),
        ("c", "shared folder", "warning"),
        ("c", "shared lock", "ok"),
        ("d", "shared folder", "failed"),
        ("d", "shared lock", "failed"),
    ]
    assert found[0].figures == {"round_trip_s": 0.2}
    assert found[5].text == "got the lock that a holds"
