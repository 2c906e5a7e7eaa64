"""A pool lends each worker to one caller, bounds its queue, and replaces workers that are lost."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import SandboxError, SandboxFullError
from mcore_rl.services.sandbox.worker import WorkerPool
from tests.support.sandboxes import run, wait_until


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(readable_paths({}), num_workers=1, max_waiting=1)
    yield made
    made.close()


def test_a_worker_is_used_again(pool: WorkerPool) -> None:
    with pool.lend() as worker:
        first = worker.pid
    with pool.lend() as worker:
        assert worker.pid == first
    assert pool.counts() == {"idle": 1, "busy": 0, "waiting": 0}


def test_the_queue_is_bounded(pool: WorkerPool) -> None:
    done = threading.Event()

    def wait() -> None:
        with pool.lend():
            done.set()

    with pool.lend():
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: pool.counts()["waiting"] == 1, "a caller waited")
        with pytest.raises(SandboxFullError, match="all 1 workers"), pool.lend():
            pass
        assert not done.is_set()
    thread.join()
    assert done.is_set()


def test_a_wait_has_a_deadline(pool: WorkerPool) -> None:
    with (
        pool.lend(),
        pytest.raises(SandboxError, match=r"waited 0.1 s for one of 1"),
        pool.lend(0.1),
    ):
        pass


def test_a_lost_worker_is_replaced(pool: WorkerPool) -> None:
    with pool.lend() as worker:
        first = worker.pid
    with pytest.raises(SandboxError), pool.lend() as worker:
        assert worker.pid == first
        os.kill(first, signal.SIGKILL)
        run(worker, "print(1)")
    with pool.lend() as worker:
        assert worker.pid != first
        worker.retire()
    with pool.lend() as worker:
        assert run(worker, "print(2)").stdout == b"2\n"


def test_a_worker_that_was_killed_while_idle_is_not_lent(pool: WorkerPool) -> None:
    with pool.lend() as worker:
        first = worker.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    with pool.lend() as worker:
        assert worker.pid != first and worker.is_alive
        assert run(worker, "print(3)").stdout == b"3\n"


def test_a_closed_pool_refuses(pool: WorkerPool) -> None:
    pool.warm_up()
    assert pool.counts()["idle"] == 1
    pool.close()
    with pytest.raises(SandboxError, match="closed"), pool.lend():
        pass


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_workers=0"):
        WorkerPool([], 0)
    with pytest.raises(ValueError, match="max_waiting=-1"):
        WorkerPool([], 1, -1)
