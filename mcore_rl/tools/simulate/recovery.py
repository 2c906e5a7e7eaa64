"""Recovers simulated ranks from memory, as run/roles/recovery.py recovers those of a run.

Ranks that are lost while they work cut the work off, and it is done again. A loss at another time
shows when the ranks are needed next.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from mcore_rl.tools.simulate.placement import Failures, RanksLostError
from mcore_rl.tools.simulate.virtual_time import VirtualTime

T = TypeVar("T")
COPY_BYTES_S = 25e9
"""Speed at which a rank copies its state to pinned host memory behind PCIe 5.0."""
DIGEST_BYTES_S = 30e9
"""Speed of xxh3 on several cores."""


class SimulatedRecovery:
    """Implements roles.Recovery."""

    def __init__(
        self,
        clock: VirtualTime,
        failures: Failures,
        recovery_s: float,
        kept_bytes: float,
        forget_links: Callable[[], None],
    ) -> None:
        """`recovery_s`: until new ranks have the state; `kept_bytes`: the largest rank's state."""
        self._clock = clock
        self._failures = failures
        self._recovery_s = recovery_s
        self._keep_s = kept_bytes / COPY_BYTES_S + kept_bytes / DIGEST_BYTES_S
        self._forget_links = forget_links

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        def train_and_keep() -> T:
            trained = work()
            self._clock.spend("keep", lambda: self._keep_s)
            return trained

        trained = self.repeat(train_and_keep)
        count = float(self._failures.num_recoveries)
        return trained, {"recovery/keep_seconds": self._keep_s, "recovery/count": count}

    def repeat(self, work: Callable[[], T]) -> T:
        while True:
            if self._failures.ranks_lost.done():
                self._recover()
            self._clock.cut = self._failures.ranks_lost
            try:
                return work()
            except RanksLostError:
                continue
            finally:
                self._clock.cut = None

    def save(self, step: int, work: Callable[[], None]) -> None:
        self.repeat(work)

    def _recover(self) -> None:
        self._clock.spend("recovery", lambda: self._recovery_s)
        self._forget_links()
        self._failures.replace_ranks()
