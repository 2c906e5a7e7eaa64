"""An event loop whose clock jumps to the next event instead of waiting for it.

The controller's coroutines run on it unchanged. It also counts the real CPU seconds of its
callbacks, by the owner that their context names: so what the controller itself costs is known
apart from the collectors and engines that one process simulates.
"""

import asyncio
import math
import selectors
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

CONTROLLER = "controller"
CLOCK_RESOLUTION_S = 1e-9
"""Events so close are at once."""
_owner: ContextVar[str] = ContextVar("owner", default=CONTROLLER)


class SimulationStuckError(RuntimeError):
    """Something is waited for, but no event will ever come."""


class _JumpingSelector(selectors.DefaultSelector):
    """Finds no file ready; the time that it should wait passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.resolution_s = CLOCK_RESOLUTION_S
        """No less than the clock can show: asyncio runs an event only before now + resolution."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise SimulationStuckError("no simulated event is left, but the controller still waits")
        if timeout > 0:  # a tiny timeout after a long time must move the clock nevertheless
            self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
            self.resolution_s = max(CLOCK_RESOLUTION_S, 2 * math.ulp(self.now_s))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        """Real seconds that callbacks took, by owner."""
        self.num_events = 0

    def time(self) -> float:
        return self._jumping.now_s

    @property
    def _clock_resolution(self) -> float:
        return self._jumping.resolution_s

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """Ignore what asyncio's own clock can show."""

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return super().call_soon(self._run_timed, callback, args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return super().call_at(when, self._run_timed, callback, args, context=context)

    def _run_timed(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        owner = _owner.get()
        began = time.perf_counter()
        try:
            callback(*args)
        finally:
            self.cpu_s[owner] += time.perf_counter() - began
            self.num_events += 1


def context_of(owner: str) -> Context:
    """Return a context whose callbacks and tasks count as those of `owner`."""
    context = copy_context()
    context.run(_owner.set, owner)
    return context
