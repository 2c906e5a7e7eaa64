"""Computes the metrics of one loop step from its samples and step statistics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, pstdev

from mcore_rl.batches.rank_seconds import summarize_ranks
from mcore_rl.types import CUT_OFF, StepStats, StoredSample
from mcore_rl.types.scores import Scores

SKIPPED = "train/skipped_share"


def summarize_samples(
    samples: Sequence[StoredSample], scores: Scores, seconds: float, role_part: str = ""
) -> dict[str, float]:
    """Return rewards, lengths (tokens) and generation speed of one rollout that took `seconds`.

    The samples have outcomes; `role_part` says which of a group are compared, see Scores.differ.
    """
    rewards_N = scores.rewards_N
    lens_N = [sample.response_len for sample in samples]
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.prompt.index, []).append(i)
    compared = [group for group in groups.values() if len(group) > 1]
    silent = [not scores.differ(group, role_part) for group in compared]
    return {
        "reward/mean": fmean(rewards_N),
        "reward/std": pstdev(rewards_N),
        **({"reward/groups_without_signal": fmean(silent)} if silent else {}),
        "rollout/samples": float(len(samples)),
        "rollout/response_len": fmean(lens_N),
        "rollout/response_len_max": float(max(lens_N)),
        "rollout/truncated_share": fmean(sample.finish_reason in CUT_OFF for sample in samples),
        "rollout/tokens_per_second": sum(lens_N) / seconds,
        **scores.means(),
        **summarize_episodes(samples),
    }


def summarize_episodes(samples: Sequence[StoredSample]) -> dict[str, float]:
    """Return means of the episodes' numbers, and the share of each reason why they ended."""
    numbers = [sample.metrics for sample in samples]
    if not any(numbers):
        return {}
    names = sorted({name for of_sample in numbers for name in of_sample})
    means = {f"episodes/{name}": fmean(n.get(name, 0.0) for n in numbers) for name in names}
    ends = Counter(sample.finish_reason for sample in samples)
    shares = {f"episodes/end/{end}": count / len(samples) for end, count in ends.items()}
    return means | shares


def summarize_steps(stats: Sequence[StepStats]) -> dict[str, float]:
    """Merge the optimizer steps of a loop step: means, the last learning rate, the maximum of
    `*_max`.

    Steps whose loss or gradient is not finite count only if there are no others; then metrics that
    are not finite are left out.
    """
    assert stats, "a loop step has at least one optimizer step"
    finite = [step for step in stats if isfinite(step.loss) and isfinite(step.grad_norm)]
    counted = finite or stats
    merged = {n: _merge(n, [step.metrics for step in counted]) for n in stats[0].metrics}
    metrics = {name: value for name, value in merged.items() if finite or isfinite(value)}
    if SKIPPED in metrics:
        metrics[SKIPPED] = fmean(step.metrics[SKIPPED] for step in stats)
    return metrics | {
        "loss/total": fmean(step.loss for step in counted),
        "loss/grad_norm": fmean(step.grad_norm for step in counted),
        "train/learning_rate": stats[-1].learning_rate,
        "train/tokens": float(sum(step.num_tokens for step in stats)),
        "train/optimizer_steps": float(len(stats)),
        **summarize_ranks(stats),
    }


def summarize_critic(stats: Sequence[StepStats]) -> dict[str, float]:
    """Merge the critic's optimizer steps, as critic/<last part>, critic/router/<name> or
    critic/ranks/<name>.
    """
    merged = summarize_steps(stats)
    merged["loss"] = merged.pop("loss/total")
    metrics = {}
    for name, value in merged.items():
        short = name if name.startswith(("router/", "ranks/")) else name.rpartition("/")[2]
        metrics[f"critic/{short}"] = value
    return metrics


def _merge(name: str, metrics: Sequence[Mapping[str, float]]) -> float:
    values = [m[name] for m in metrics]
    return max(values) if name.endswith("_max") else fmean(values)
