"""The charts that tell whether a run learns and how fast, in the order in which one reads them.

Trackers that take an order from code get this one; those that hide charts hide the others.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from mcore_rl.logs.names import FORMER_NAMES

FIRST_CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Learning": {
        "reward": ("reward/mean",),
        "right answers to held-out prompts": ("eval/greedy_accuracy", "eval/*/greedy_accuracy"),
        "groups without signal": ("reward/groups_without_signal",),
        "loss of sft, nats": ("loss/nll",),
        "preferred pairs": ("preference/accuracy",),
        "response length, tokens": ("rollout/response_len", "rollout/response_len_max"),
        "truncated responses": ("rollout/truncated_share",),
        "entropy, nats": ("loss/entropy",),
        "KL to the reference, nats": ("kl/ref",),
        "KL to the teacher, nats": ("kl/teacher",),
        "variance that the critic explains": ("critic/explained_variance",),
        "gradient norm": ("loss/grad_norm",),
    },
    "Trainer and engines": {
        "difference of log-probs, nats": ("logprob_diff/mean",),
        "staleness, versions": ("staleness/mean", "staleness/max"),
    },
    "Speed": {
        "generated tokens per second": ("rollout/tokens_per_second",),
        "trained tokens per second": ("train/tokens_per_second",),
        "trained tokens per second and rank": ("train/tokens_per_second_per_gpu",),
        "seconds of a step": ("time/*",),
    },
}
"""Section -> chart -> its metrics; * stands for any text."""

PATTERNS = tuple(
    pattern
    for charts in FIRST_CHARTS.values()
    for patterns in charts.values()
    for pattern in patterns
)
"""All of these metrics, in their order."""


def select_first(names: Iterable[str]) -> list[str]:
    """Return those of the metrics that these charts show, in their order."""
    sections = select_charts(names).values()
    return [name for charts in sections for shown in charts.values() for name in shown]


def select_charts(names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Return section -> chart -> its metrics among `names`, and nothing that is empty."""
    current = [name for name in names if not name.startswith(tuple(FORMER_NAMES.values()))]
    selected: dict[str, dict[str, list[str]]] = {}
    for section, charts in FIRST_CHARTS.items():
        for chart, patterns in charts.items():
            shown = [name for each in patterns for name in current if fnmatchcase(name, each)]
            if shown:
                selected.setdefault(section, {})[chart] = shown
    return selected
