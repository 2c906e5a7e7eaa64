"""Merges rankings of several indexes into one."""

from collections.abc import Sequence

RANK_OFFSET = 60
"""Constant k of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""


def fuse(rankings: Sequence[Sequence[int]], num: int) -> list[tuple[int, float]]:
    """Return (passage, score) of the `num` best passages of all rankings, the best first.

    A passage's score is the sum of 1 / (60 + rank) over the rankings that have it, with ranks from
    1 on; of equal passages the one with the lower number comes first.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, passage in enumerate(ranking, start=1):
            scores[passage] = scores.get(passage, 0.0) + 1.0 / (RANK_OFFSET + rank)
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return best[:num]
