"""Decides which of several sources gives the next item, so that shares are exact at every moment.

R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): after any number n of
items, source i with share w_i has given w_i * n of them, to within 1 - 1 / (2k - 2) for k sources.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Mixing:
    """The sequence of sources, by weights. Its position is the number of items of each source."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Decimal weights such as 0.1 count as what they say, not as binary fractions."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._total = sum(self._weights)
        self.counts = [0] * len(weights)
        """Items that each source has given."""

    def next(self) -> int:
        """Return the source of the next item, and count the item."""
        chosen = self._choose()
        self.counts[chosen] += 1
        return chosen

    def _choose(self) -> int:
        """Return, of the sources that are behind, the one that would first be too far behind.

        With n items given, source i is behind by w_i * (n + 1) - counts[i]. All numbers are
        multiplied by the sum of the weights and by `parts`, which makes them integers.
        """
        num_sources = len(self._weights)
        if num_sources == 1:
            return 0
        parts = 2 * num_sources - 2
        item = sum(self.counts) + 1
        best = -1
        best_slack, best_weight = 0, 1
        for i, (weight, count) in enumerate(zip(self._weights, self.counts, strict=True)):
            behind = parts * (weight * item - count * self._total)
            if behind < self._total:
                continue
            slack = (parts - 1) * self._total - behind
            if best < 0 or slack * best_weight < best_slack * weight:
                best = i
                best_slack, best_weight = slack, weight
        assert best >= 0, (self._weights, self.counts)
        return best
