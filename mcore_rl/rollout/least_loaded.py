"""Finds the least loaded of many, in logarithmic time per change."""

import heapq
import math


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

    def remove(self, thing: int) -> None:
        """Leave a thing out until it is put back."""
        self.add(thing, math.inf)

    def put_back(self, thing: int) -> None:
        """Take in a thing that was removed, with no load."""
        self._loads[thing] = 0.0
        heapq.heappush(self._heap, (0.0, thing))

    def least(self) -> int | None:
        """Return the least loaded thing; None if all are removed."""
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        load, thing = self._heap[0]
        return None if load == math.inf else thing
