"""Measures the seconds in which a rank computes itself, without those in which it waits for others.

    on a CPU   the thread runs or wants a core: a wait for another rank's message is neither
    on a GPU   from the first kernel of a pass to the last one before gradients are reduced; waits
               inside of passes, for ranks of the same replica, count

Nothing is synchronized: a GPU's times are read after a step, which has waited for the GPU anyway.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from mcore_rl.device import has_cuda

_SCHEDULER = "/proc/thread-self/schedstat"
"""Nanoseconds of this thread on a core, and of its waits for one."""


def read_thread_s() -> float:
    """Return the seconds in which this thread ran or waited for a core so far.

    Without Linux's figures, the waits are left out.
    """
    try:
        with open(_SCHEDULER) as file:
            ran, waited, _ = file.read().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


def read_pass_s() -> float:
    """Return seconds by which passes of an engine are compared, in the thread that runs them.

    On a CPU those in which the thread ran, as other processes may take its core meanwhile.
    """
    return time.monotonic() if has_cuda() else time.thread_time()


class RankClock:
    """Sums the seconds of work by phase."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Any, Any]] = []
        """Phases on a GPU, and the events at their begin and end."""
        self._began: tuple[str, Any] | None = None

    def begin(self, phase: str) -> None:
        """Begin a phase; one that is under way is over."""
        self.end()
        self._began = phase, _mark() if has_cuda() else read_thread_s()

    def end(self) -> None:
        """End the phase that is under way; without one, do nothing."""
        if self._began is None:
            return
        phase, began = self._began
        self._began = None
        if has_cuda():
            self._spans.append((phase, began, _mark()))
        else:
            self._sums[phase] += read_thread_s() - began

    def end_before(self, work: Callable[..., None]) -> Callable[..., None]:
        """Return `work`, which ends the phase first."""

        def end_and_work(*args: Any, **kwargs: Any) -> None:
            self.end()
            work(*args, **kwargs)

        return end_and_work

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call; on a GPU, wait for their ends."""
        for phase, began, ended in self._spans:
            ended.synchronize()
            self._sums[phase] += began.elapsed_time(ended) / 1e3
        self._spans.clear()
        taken = dict(self._sums)
        self._sums.clear()
        return taken


def _mark() -> Any:
    """Return an event at this point of the GPU's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
