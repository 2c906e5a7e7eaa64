"""Finds log-probs that are no finite numbers. Engines send NaN as null in JSON."""

import math
from collections.abc import Sequence


def find_not_finite(logprobs: Sequence[float | None]) -> int | None:
    """Return the index of the first log-prob that is NaN, infinite or missing; None: there is none.

    A token that was drawn has a probability above 0, so -inf is a fault, too.
    """
    for index, logprob in enumerate(logprobs):
        if logprob is None or not math.isfinite(logprob):
            return index
    return None
