"""Lets the seconds of ranks pass in a simulation, and runs coroutines for code without a loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from mcore_rl.tools.simulate.machine import WorkClock
from mcore_rl.tools.simulate.virtual_loop import VirtualLoop

HAND_OVER_S = 1e-4
"""Seconds that the controller's thread takes to hand work to its event loop."""
T = TypeVar("T")
S = TypeVar("S")


class VirtualTime:
    """Stands between the controller's thread and the event loop; `watched` plays roles.Watched."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.in_loop_s = 0.0
        """Real seconds inside the event loop."""
        self.predicting_s = 0.0
        """Real seconds in which costs were predicted, which no controller spends."""
        self.lost: asyncio.Future[None] = loop.create_future()
        self._tallied: list[tuple[WorkClock, float]] | None = None
        """Seconds of one of two models that work at once."""
        self._unshared = WorkClock(loop, {})
        self.on_span: Callable[[str, float, float], None] = lambda name, begin_s, end_s: None

    def watch(self, work: Awaitable[T]) -> T:
        """Return what `work` does. Raises RunLostError as soon as the run is lost."""
        began = time.perf_counter()
        try:
            return self.loop.run_until_complete(self._first(work))
        finally:
            self.in_loop_s += time.perf_counter() - began

    def spend(self, name: str, predict: Callable[[], float], on: WorkClock | None = None) -> None:
        """Let the seconds pass that `predict` returns, while everything else goes on.

        on   counts the seconds, as those in which its processes work; None: nobody slows them
        """
        began = time.perf_counter()
        seconds = predict()
        self.predicting_s += time.perf_counter() - began
        clock = on or self._unshared
        if self._tallied is not None:
            self._tallied.append((clock, seconds))
            return
        begin_s = self.loop.time()
        self.watch(clock.work(seconds))
        self.on_span(name, begin_s, self.loop.time())

    def both(self, first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
        """Return (first(), second()) after the longer of their times; plays roles.BothAtOnce."""
        results: list[Any] = []
        tallies = []
        for work in (first, second):
            self._tallied = []
            results.append(work())
            tallies.append(self._tallied)
        self._tallied = None
        begin_s = self.loop.time()
        self.watch(_all(_work(tally) for tally in tallies))
        self.on_span("trainer and critic", begin_s, self.loop.time())
        return results[0], results[1]

    async def _first(self, work: Awaitable[T]) -> T:
        await asyncio.sleep(HAND_OVER_S)
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self.lost.result()
        return await task


async def _work(tally: Sequence[tuple[WorkClock, float]]) -> None:
    for clock, seconds in tally:
        await clock.work(seconds)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)
