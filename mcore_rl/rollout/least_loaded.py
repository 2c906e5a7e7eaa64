"""Finds the least loaded of many, in logarithmic time per change."""

import heapq


class LeastLoaded:
    """Loads of things numbered from 0; of equal ones the first is the least loaded."""

    def __init__(self, num_things: int) -> None:
        self._loads = [0.0] * num_things
        self._heap = [(0.0, k) for k in range(num_things)]
        """Has the load of each thing, and outdated ones that were not met yet."""

    def add(self, thing: int, load: float) -> None:
        """Raise a load; a negative number lowers it."""
        self._loads[thing] += load
        heapq.heappush(self._heap, (self._loads[thing], thing))

    def least(self) -> int:
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]
