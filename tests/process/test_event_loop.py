"""One event loop for many callers: results, errors, cancellation, and an end that does not hang."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from mcore_rl.process.event_loop import EventLoop


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def test_results_and_errors_come_back_to_any_thread() -> None:
    loop = EventLoop()
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(loop.run(add(i, 1)))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [1, 2, 3, 4]

    async def fail() -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError, match="no"):
        loop.run(fail())
    loop.close()


def test_all_work_runs_on_one_loop() -> None:
    loop = EventLoop()

    async def current() -> int:
        return id(asyncio.get_running_loop())

    assert loop.run(current()) == loop.run(current())
    loop.close()


def test_a_cancelled_future_cancels_its_work() -> None:
    loop = EventLoop()
    begun, canceled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            canceled.set()
            raise

    future = loop.start(wait())
    assert begun.wait(10)
    future.cancel()
    assert canceled.wait(10)
    loop.close()


def test_close_cancels_what_is_under_way() -> None:
    loop = EventLoop()
    future = loop.start(asyncio.sleep(60))
    loop.run(add(1, 1))
    loop.close()
    with pytest.raises(CancelledError):
        future.result(10)


def test_close_leaves_a_loop_behind_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.process.event_loop.CLOSE_S", 0.05)
    loop = EventLoop()
    release = threading.Event()

    async def block() -> None:
        release.wait(20)

    future = loop.start(block())
    loop.close()
    assert not future.done()
    release.set()
    future.result(10)
