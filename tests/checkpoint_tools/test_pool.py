"""Results and errors of tasks in worker processes."""

import errno
import multiprocessing as mp
import os
import signal
from collections import defaultdict

import pytest

from checkpoint_tools.pool import Pool
from mcore_rl.process.disk import DiskFullError


def work(task: int) -> int:
    if task == 3:
        raise ValueError("three")
    if task == 4:
        raise OSError(errno.EIO, "broken")
    if task == 5:
        raise DiskFullError("full")
    if task == 6:
        raise KeyError("six")
    if task == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return -task


def run(tasks: list[int], num_workers: int = 2) -> dict[int, int]:
    with Pool(lambda: work, num_workers) as pool:
        return dict(pool.run(tasks))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_come_with_their_tasks(num_workers: int) -> None:
    assert run([0, 1, 2, 8, 9], num_workers) == {task: -task for task in (0, 1, 2, 8, 9)}


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (3, ValueError, "^three$"),
        (4, OSError, "broken"),
        (5, DiskFullError, "^full$"),
        (6, RuntimeError, "Traceback(.|\n)*KeyError: 'six'"),
        (7, RuntimeError, r"a worker died \(exit code -9\) during 7"),
    ],
)
def test_the_first_error_is_raised(task: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run([task])


def test_workers_share_a_lane_only_at_the_end() -> None:
    meeting = mp.get_context("fork").Barrier(2)

    def work_together(task: tuple[str, int]) -> int:
        meeting.wait(10.0)  # both workers are at a task at the same time
        return os.getpid()

    tasks = [(lane, number) for lane in "abc" for number in range(2)]
    workers: dict[str, list[int]] = defaultdict(list)
    with Pool(lambda: work_together, 2) as pool:
        for (lane, _), worker in pool.run(tasks, lane_of=lambda task: task[0]):
            workers[lane].append(worker)
    assert [len(set(workers[lane])) for lane in "abc"] == [1, 1, 2]


def test_close_ends_the_workers() -> None:
    pool = Pool(lambda: work, 2)
    _, *workers = pool.process_ids
    pool.close()
    assert len(workers) == 2
    for process_id in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
