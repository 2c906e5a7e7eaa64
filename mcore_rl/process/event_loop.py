"""Runs coroutines from any thread on one event loop thread, and two functions at the same time."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def run_both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """Return (first(), second()), with `second` in its own thread; raise the error of either.

    If `first` raises, `second` ends before the error is raised, by deadlines of its own: who does
    the work again must not meet it. The thread is a daemon, so that Ctrl-C need not wait.
    """
    outcome: Future[S] = Future()

    def run() -> None:
        try:
            outcome.set_result(second())
        except BaseException as error:  # outcome.result() raises it in the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="at_once", daemon=True).start()
    try:
        found = first()
    except Exception:
        wait([outcome])
        raise
    return found, outcome.result()


CLOSE_S = 5.0
"""Seconds within which canceled work must end after `close`."""


class EventLoop:
    """One event loop for all calls of a run, in a thread of its own.

    Connections outlive a call. Coroutines run while the caller computes or waits for ranks.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="event loop", daemon=True
        )
        self._thread.start()

    def start(self, work: Awaitable[T]) -> "Future[T]":
        """Start `work` and return its future; canceling the future cancels `work`."""

        async def wait_for_work() -> T:  # run_coroutine_threadsafe takes only coroutines
            return await work

        return asyncio.run_coroutine_threadsafe(wait_for_work(), self._loop)

    def run(self, work: Awaitable[T]) -> T:
        """Return the result of `work`; cancel `work` if the wait is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all work and end the thread; abandon the thread if it hangs for CLOSE_S."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Work that has just ended hands its result to a waiting thread in the next iteration.
        await asyncio.sleep(0)
        self._loop.stop()
