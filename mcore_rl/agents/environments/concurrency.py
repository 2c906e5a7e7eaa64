"""Decides how many episodes a worker takes at once, from how long its answers take."""

import statistics

WINDOW_LEN = 16
SLOW_RATIO = 2.0
SLOW_MARGIN_S = 0.2
"""Nobody waits for less beside a policy that samples tokens."""
DECREASE = 0.7
FORGET = 1.1
"""Factor by which the best is forgotten per slow window, as later tasks may be slower by nature."""


class Concurrency:
    """Additive increase, multiplicative decrease between an eighth of `most` and `most` episodes.

    The median of a window of answers, at least WINDOW_LEN and about one of each episode, is
    compared with the best median that this worker has had. A window more than SLOW_RATIO times as
    slow lowers `limit`; any other raises it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.least = max(1, most // 8)
        self.limit = max(1, most // 2)
        self._best_s: float | None = None
        self._window: list[float] = []

    def observe(self, seconds: float) -> str:
        """Take the seconds of one answer; return why `limit` fell, or an empty text."""
        self._window.append(seconds)
        if len(self._window) < max(WINDOW_LEN, self.limit):
            return ""
        median_s = statistics.median(self._window)
        self._window.clear()
        if self._best_s is None or median_s < self._best_s:
            self._best_s = median_s
        before = self.limit
        best_s = self._best_s
        if median_s > SLOW_RATIO * self._best_s + SLOW_MARGIN_S:
            self.limit = max(self.least, int(self.limit * DECREASE))
            self._best_s = min(median_s, self._best_s * FORGET)
        else:
            self.limit = min(self.most, self.limit + self.least)
        if self.limit >= before:
            return ""
        return (
            f"its answers take {median_s:.3f} s, {best_s:.3f} s at best: "
            f"it takes {self.limit} episodes at once instead of {before}"
        )
