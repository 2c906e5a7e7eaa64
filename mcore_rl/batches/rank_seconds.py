"""Finds the rank that works longest in each phase, from the seconds of its own work.

A rank is compared with the other ranks of its pipeline stage, since stages have unequal work.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from mcore_rl.types import RankSeconds, RankStep, StepStats


def join_rank_steps(steps: Sequence[RankStep]) -> StepStats:
    """Return the stats of an optimizer step, with the seconds of all ranks; `steps` by rank."""
    stats = next(step.stats for step in steps if step.stats is not None)
    phases = sorted({phase for step in steps for phase in step.seconds})
    seconds = {phase: [step.seconds.get(phase, 0.0) for step in steps] for phase in phases}
    return replace(stats, ranks=RankSeconds([step.stage for step in steps], seconds))


def summarize_ranks(stats: Sequence[StepStats]) -> dict[str, float]:
    """Return how far the slowest rank of a loop step lags behind, and its number.

    `lag` is its seconds divided by the median of the others of its stage: of all phases together,
    and of each. {} if no rank has others.
    """
    known = [step.ranks for step in stats if step.ranks is not None]
    if not known:
        return {}
    stages = known[0].stages
    total = [0.0] * len(stages)
    metrics = {}
    for phase in sorted({phase for ranks in known for phase in ranks.seconds}):
        answers = [ranks.seconds[phase] for ranks in known if phase in ranks.seconds]
        sums = [sum(of_rank) for of_rank in zip(*answers, strict=True)]
        total = [before + own for before, own in zip(total, sums, strict=True)]
        if found := find_slowest(sums, stages):
            metrics[f"ranks/lag_in/{phase}"], metrics[f"ranks/slowest_in/{phase}"] = found
    if found := find_slowest(total, stages):
        metrics["ranks/lag"], metrics["ranks/slowest"] = found
    return metrics


def find_slowest(seconds: Sequence[float], stages: Sequence[int]) -> tuple[float, float] | None:
    """Return (lag, rank) of the rank that lags most; None if no rank has others in its stage."""
    by_stage: dict[int, list[int]] = {}
    for rank, stage in enumerate(stages):
        by_stage.setdefault(stage, []).append(rank)
    lags = []
    for ranks in by_stage.values():
        *others, slowest = sorted(ranks, key=lambda rank: seconds[rank])
        if others and (usual := median(seconds[rank] for rank in others)) > 0:
            lags.append((seconds[slowest] / usual, float(slowest)))
    return max(lags, default=None)
