"""Calls to ranks on real Ray: values, errors, deaths, deadlines, and no process left afterwards."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster.group import RankError, RankGroup, guard
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import (
    ClusterConfig,
)
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.process.log_files import find_segments, rotate_logs
from mcore_rl.process.signals import TerminatedError
from tests.support.cluster_workers import Worker
from tests.support.debuggers import ray_debug
from tests.support.trainer_groups import wait_until_gone

pytestmark = pytest.mark.e2e

ROTATE_BYTES = 1 << 20
"""More than ranks write here, except where they are asked to."""


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with (
        rotate_logs(ROTATE_BYTES),
        open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=8),
    ):
        yield


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Callable[[int], RankGroup]]:
    groups, placements = [], []

    def make(num_ranks: int, first_rank: int = 0) -> RankGroup:
        [slots] = reserve([plan_ranks(num_ranks, 0.5, gpus_per_node=0)], timeout_s=20)
        placements.append(slots[0].group)
        groups.append(RankGroup("trainer", slots, tmp_path / "logs"))
        groups[-1].build(Worker, [(first_rank + k,) for k in range(num_ranks)], deadline_s=60)
        return groups[-1]

    yield make
    for group in groups:
        group.kill()
    for placement in placements:
        remove_placement_group(placement)


def test_slices_reach_their_coordinate_and_owners_answer(make_group) -> None:
    group = make_group(4)
    group.find_coordinates(deadline_s=30)
    assert group.call_all("scaled", [1], factor=2, deadline_s=30) == [(k, [2]) for k in range(4)]
    assert group.dispatch("scaled", [[1, 2], [3]], 10, deadline_s=30) == [(1, [10, 20]), (3, [30])]
    answers = asyncio.run(group.call_all_async("scaled", [1], 3, deadline_s=30))
    assert answers == [(k, [3]) for k in range(4)]
    with pytest.raises(ValueError, match="3 slices for data-parallel size 2"):
        group.dispatch("scaled", [[1], [2], [3]], 10, deadline_s=30)
    group.call_all("speak", deadline_s=30)
    assert str(group.ranks[3]).startswith("rank 3 (trainer, dp 1 tp 1, log ")
    for k, rank in enumerate(group.ranks):
        assert f"said by {k}\nwritten by {k}\n" in rank.log_path.read_text()


@pytest.mark.slow
def test_the_log_of_a_rank_is_rotated(make_group) -> None:
    group = make_group(1)
    log = group.ranks[0].log_path
    group.call_all("speak_at_length", ROTATE_BYTES, deadline_s=30)
    until_s = time.monotonic() + 30
    while not find_segments(log) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert [path.stat().st_size > ROTATE_BYTES for path in find_segments(log)] == [True]


def test_an_exception_names_its_rank_and_shows_only_our_frames(make_group) -> None:
    group = make_group(2)
    group.find_coordinates(deadline_s=30)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.call_all("fail", 1, deadline_s=60)
    assert time.monotonic() - began < 30
    first, *frames = str(caught.value).splitlines()
    assert (
        first
        == f"rank 1 (trainer, dp 0 tp 1, log {group.ranks[1].log_path}): ValueError: bad value on 1"
    )
    files = [line.split('"')[1] for line in frames if line.startswith("  File")]
    assert files == [files[0]] * 2 and files[0].endswith("support/cluster_workers.py"), frames
    assert "json/decoder.py" in group.ranks[1].log_path.read_text()
    with pytest.raises(RankError, match="after the ranks were stopped"):
        group.call_all("speak", deadline_s=30)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "killed"),
        pytest.param("exit", "killed, crashed", marks=pytest.mark.slow),
        pytest.param("sys.exit", "exit code 4", marks=pytest.mark.slow),
        pytest.param("segfault", "killed, crashed", marks=pytest.mark.slow),
    ],
)
def test_a_death_is_told_first_and_ends_the_group(
    make_group, how: str, cause: str, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_rl.cluster.answers.GRACE_S", 50.0)
    group = make_group(3)
    pids = group.pids()
    began = time.monotonic()
    with pytest.raises(
        RankError, match=rf"^trainer rank 2 died \({cause}.*\) during die; log .*rank2.log$"
    ):
        asyncio.run(group.call_all_async("die", 2, how, deadline_s=60))
    assert time.monotonic() - began < 30
    assert wait_until_gone(pids) == []
    assert capfd.readouterr() == ("", "")
    if how == "segfault":
        assert "in die" in group.ranks[2].log_path.read_text()


def test_a_deadline_names_the_late_ranks_and_leaves_their_stacks(make_group) -> None:
    group = make_group(2)
    with pytest.raises(
        RankError, match=r"(?s)rank 1 of 2 did not answer sleep within 2 s.*trainer_rank1.log"
    ):
        group.call_all("sleep", 1, deadline_s=2)
    assert 'workers.py", line' in group.ranks[1].log_path.read_text()
    assert "workers.py" not in group.ranks[0].log_path.read_text()


def test_a_stopped_rank_is_told_as_such(make_group) -> None:
    group = make_group(2)
    pid = group.pids()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(RankError) as late:
            group.call_all("scaled", [1], 3, deadline_s=2)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    first, second, *_ = str(late.value).splitlines()
    assert first == f"{group.ranks[1]} is stopped (state T; SIGCONT lets it go on)"
    assert second.startswith("trainer: rank 1 of 2 did not answer scaled within 2 s")


def test_start_up_errors_name_the_rank(make_group) -> None:
    with pytest.raises(
        RankError, match=r"^rank 1 \(trainer, log .*\): ValueError: no rank 99 here"
    ):
        make_group(2, first_rank=98)


@pytest.mark.parametrize("victim", ["child", pytest.param("rank", marks=pytest.mark.slow)])
def test_a_watch_ends_work_that_needs_a_dead_process(make_group, victim: str) -> None:
    group = make_group(2)
    pids = {"child": group.call_all("start_child", deadline_s=30), "rank": group.pids()}

    async def work() -> None:
        await asyncio.sleep(2)
        os.kill(pids[victim][1], signal.SIGKILL)
        killed.append(time.monotonic())
        await asyncio.sleep(60)

    killed: list[float] = []
    expected = {
        "child": r"rank 1 .*RuntimeError: server ended with -9",
        "rank": r"trainer rank 1 died",
    }
    with pytest.raises(RankError, match=expected[victim]):
        asyncio.run(guard(work(), group.watch("check", call_timeout_s=60)))
    assert time.monotonic() - killed[0] < 30
    assert wait_until_gone(pids["rank"]) == []
    os.kill(pids["child"][0], signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_health_checks_is_named(make_group) -> None:
    group = make_group(2)

    async def work() -> None:
        with suppress(RankError):
            await group.call_one_async(1, "sleep", 1, deadline_s=60)

    with pytest.raises(
        RankError, match=r"rank 1 of 2 did not answer a health check within 1.5 s; where they were"
    ):
        asyncio.run(guard(work(), group.watch(call_timeout_s=0.5)))


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        pytest.param(signal.SIGTERM, TerminatedError, marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_after_a_signal_and_after_a_canceled_call(
    make_group, number: signal.Signals, error: type[BaseException]
) -> None:
    """They may complete what they write; a rank that was killed would lose it."""
    group = make_group(2)
    group.find_coordinates(deadline_s=30)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    with pytest.raises(error):
        group.call_all("rest", 1.0, deadline_s=30)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(group.call_all_async("rest", 1.0, deadline_s=30), 0.3))
    assert group.call_all("scaled", [1], factor=2, deadline_s=30) == [(k, [2]) for k in range(2)]


@pytest.mark.parametrize(
    "kind",
    [
        "dispatch",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("call_all", "call_each")),
    ],
)
def test_a_signal_waits_until_a_call_is_on_its_way_to_all_ranks(make_group, kind: str) -> None:
    """Otherwise a rank would wait in a collective for one that never got the call."""
    group = make_group(2)
    group.find_coordinates(deadline_s=30)
    last = group._actors[1]

    def call_last(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # Python's handler runs here.
        return last.call.remote(*args)

    arguments = {"call_all": [1], "call_each": [([1],), ([1],)], "dispatch": [[1]]}[kind]
    group._actors[1] = SimpleNamespace(call=SimpleNamespace(remote=call_last))
    with pytest.raises(KeyboardInterrupt):
        getattr(group, kind)("count", arguments, deadline_s=30)
    group._actors[1] = last
    assert group.call_all("count", [0], deadline_s=30) == [2, 2]


def test_guarded_work_returns_while_all_is_well(make_group) -> None:
    group = make_group(1)

    async def work() -> int:
        await asyncio.sleep(1.5)
        return 7

    assert asyncio.run(guard(work(), group.watch("check", call_timeout_s=60))) == 7
    assert group.call_all("coordinate", deadline_s=30)


@pytest.mark.slow
def test_breakpoint_in_a_rank_answers_to_ray_debug(make_group) -> None:
    group = make_group(1)

    async def debug() -> str:
        log = group.ranks[0].log_path
        await wait_for_text(log, "waits for")
        return await asyncio.to_thread(ray_debug, log.read_text(), "answer = 42", "continue")

    async def both() -> tuple[list[int], str]:
        call = asyncio.ensure_future(group.call_all_async("pause", deadline_s=60))
        output = await asyncio.wait_for(debug(), timeout=50)
        return await call, output

    answers, output = asyncio.run(both())
    assert answers == [42]
    assert "ray::trainer_rank0.call" in output and "workers.py" in output


async def wait_for_text(path: Path, text: str, timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while text not in path.read_text():
        assert time.monotonic() < until, path.read_text()
        await asyncio.sleep(0.1)


def test_what_the_cluster_cannot_hold_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match=r"needs 12 CPU and 0 GPU in 24 bundles.*of 8 CPU"):
        reserve([plan_ranks(24, 0.5, gpus_per_node=0)], timeout_s=1)
