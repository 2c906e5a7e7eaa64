"""Lets one of many like messages through in a while, as in an outage that each request meets."""

from mcore_rl.process.clock import now_s


class LogThrottle:
    """Says which messages to write: the first, and one in every `every_s` seconds after it."""

    def __init__(self, every_s: float = 30.0) -> None:
        self._every_s = every_s
        self._next_s = -float("inf")
        self._num_held = 0

    def is_due(self, num_events: int = 1) -> bool:
        """Return whether to write about `num_events` now; those that are not due are counted."""
        if now_s() < self._next_s:
            self._num_held += num_events
            return False
        self._next_s = now_s() + self._every_s
        return True

    def describe_held(self) -> str:
        """Return "" or ", and 12 more before it" for what was counted, which is forgotten."""
        held = self._num_held
        self._num_held = 0
        return f", and {held} more before it" if held else ""
