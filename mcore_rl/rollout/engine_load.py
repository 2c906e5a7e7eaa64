"""Counts the requests of one engine that are in flight, and the seconds without any."""

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_rl.process.clock import now_s
from mcore_rl.rollout.engine_spec import EngineAddress


class EngineLoad:
    """An engine, the number of its requests in flight, and the seconds it spent without any."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.num_in_flight = 0
        # Seconds of the idle spans that ended, and the start of the present one or None. They are
        # one tuple, so that another thread reads both at once.
        self._idle: tuple[float, float | None] = (0.0, now_s())

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request for the length of the block."""
        idle_s, since_s = self._idle
        if since_s is not None:
            self._idle = idle_s + now_s() - since_s, None
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle = self._idle[0], now_s()

    @property
    def idle_s(self) -> float:
        """Seconds without a request so far; safe to read from another thread."""
        idle_s, since_s = self._idle
        return idle_s if since_s is None else idle_s + now_s() - since_s
