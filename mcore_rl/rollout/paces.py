"""Finds the engine that answers slowest, from the seconds that its tokens took at each load.

requests --(engine, load) -> tokens, seconds--> EnginePaces --> lag of each engine, at equal load
"""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import median

Paces = Mapping[tuple[int, int], tuple[int, float]]
"""(number of an engine, class of its load) -> (tokens, seconds of the requests that drew them)."""


class EnginePaces:
    """Adds up the tokens of requests and their seconds, by engine and load."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, engine: int, load: float, num_tokens: int, seconds: float) -> None:
        """Count a request; `load` is the mean number of the engine's requests meanwhile.

        Loads are of one class from a power of two to the next.
        """
        if num_tokens:
            self.add({(engine, round(load).bit_length()): (num_tokens, seconds)})

    def add(self, paces: Paces) -> None:
        """Count what was counted elsewhere."""
        for key, (num_tokens, seconds) in paces.items():
            tokens_before, seconds_before = self._sums.get(key, (0, 0.0))
            self._sums[key] = tokens_before + num_tokens, seconds_before + seconds

    def take(self) -> Paces:
        """Return the sums, and begin anew; another thread may count meanwhile."""
        sums, self._sums = self._sums, {}
        return dict(sums)


def measure_lag(paces: Paces) -> dict[str, float]:
    """Return how far the slowest engine lags behind, and its number; {} if it has no others.

    `lag` is its seconds divided by those that its tokens would have taken at the pace of the
    others, which is their median seconds per token at the same load.
    """
    seconds: dict[int, float] = {}
    expected: dict[int, float] = {}
    by_load: dict[int, dict[int, tuple[int, float]]] = {}
    for (engine, load), pace in paces.items():
        by_load.setdefault(load, {})[engine] = pace
    for engines in by_load.values():
        usual = _find_usual({e: took_s / num for e, (num, took_s) in engines.items()})
        for engine, of_token in usual.items():
            num_tokens, own_seconds = engines[engine]
            seconds[engine] = seconds.get(engine, 0.0) + own_seconds
            expected[engine] = expected.get(engine, 0.0) + num_tokens * of_token
    lags = [(seconds[engine] / most, engine) for engine, most in expected.items() if most > 0]
    if not lags:
        return {}
    lag, slowest = max(lags)
    return {"engines/lag": lag, "engines/slowest": float(slowest)}


def _find_usual(paces: Mapping[int, float]) -> dict[int, float]:
    """Return for each thing the median of the others' paces; {} for a single one."""
    if len(paces) < 2:
        return {}
    ordered = sorted(paces.values())
    usual = {}
    for thing, pace in paces.items():
        place = bisect_left(ordered, pace)
        usual[thing] = median([*ordered[:place], *ordered[place + 1 :]])
    return usual
