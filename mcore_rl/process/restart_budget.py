"""Counts the restarts of one process; those of the last hour count against a limit."""

import time
from collections import deque

HOUR_S = 3600.0


class RestartBudget:
    """The restarts so far: a run of weeks may lose a process now and then, not all the time."""

    def __init__(self) -> None:
        self._taken_s: deque[float] = deque()

    def take(self, most: int) -> bool:
        """Take a restart; return False, and take none, if `most` were taken within an hour."""
        if self.num_recent >= most:
            return False
        self._taken_s.append(time.monotonic())
        return True

    @property
    def num_recent(self) -> int:
        """Restarts within the last hour."""
        while self._taken_s and time.monotonic() - self._taken_s[0] > HOUR_S:
            self._taken_s.popleft()
        return len(self._taken_s)
