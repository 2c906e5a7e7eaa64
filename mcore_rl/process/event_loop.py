"""One event loop in a thread of its own: coroutines in from any thread, their results out."""

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

CLOSE_S = 5.0


class EventLoop:
    """One event loop for all calls of a run, in a thread of its own: connections outlive a call, and what was
    begun goes on while the caller computes or waits for ranks.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="event loop", daemon=True
        )
        self._thread.start()

    def start(self, work: Awaitable[T]) -> "Future[T]":
        """Begin `work`; cancelling the future cancels it."""

        async def whole() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(whole(), self._loop)

    def run(self, work: Awaitable[T]) -> T:
        """Wait for `work`, which is cancelled if the wait is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is under way and end the thread; one that hangs is left behind after a few seconds."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()
