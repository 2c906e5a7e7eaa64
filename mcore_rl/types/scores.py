"""Keeps the rewards of samples, and what they were made of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

T = TypeVar("T")
ENVIRONMENT = "environment"
"""The part of a reward that an episode's environment gives."""


@dataclass(frozen=True)
class Scores:
    """The rewards of samples; every list has an entry per sample.

    rewards_N       NaN where the sample has no outcome: nothing is known of the policy, and no
                    step trains on it
    parts           the numbers that rewards were made of, by name
    errors          why a sample has no reward of its own; empty where it has
    greedy_N        the reward of the greedy response to the same prompt, where it was asked for
    unpenalized_N   the reward before penalties; rewards_N itself if not given
    is_lost_N       whether an episode's environment failed or was lost, so that nothing was scored;
                    all False if not given
    advantages_N    the advantage that all tokens of a sample train with, NaN where it does not
                    train; empty unless each has one
    """

    rewards_N: list[float]
    parts: Mapping[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    greedy_N: list[float] = field(default_factory=list)
    unpenalized_N: list[float] = field(default_factory=list)
    is_lost_N: list[bool] = field(default_factory=list)
    advantages_N: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.unpenalized_N:
            object.__setattr__(self, "unpenalized_N", list(self.rewards_N))
        if not self.is_lost_N:
            object.__setattr__(self, "is_lost_N", [False] * len(self.rewards_N))

    @property
    def has_outcome_N(self) -> list[bool]:
        """Return whether each sample has a reward that tells something of the policy."""
        return [not math.isnan(reward) for reward in self.rewards_N]

    def select(self, indices: Sequence[int]) -> "Scores":
        def pick(values: list[Any]) -> list[Any]:
            return [values[i] for i in indices] if values else []

        parts = {name: pick(values) for name, values in self.parts.items()}
        return Scores(
            pick(self.rewards_N),
            parts,
            pick(self.errors),
            pick(self.greedy_N),
            pick(self.unpenalized_N),
            pick(self.is_lost_N),
        )

    def with_baselines(self, greedy: "Scores") -> "Scores":
        """Return the scores with the rewards of the prompts' greedy responses.

        Equally many neighboring samples belong to each greedy response. If its reward failed, they
        have nothing to be compared with, and so no outcome.
        """
        group_size = len(self.rewards_N) // len(greedy.rewards_N)
        greedy_N = [reward for reward in greedy.rewards_N for _ in range(group_size)]
        why_G = greedy.errors or [""] * len(greedy.rewards_N)
        rewards_N = list(self.rewards_N)
        errors = list(self.errors or [""] * len(rewards_N))
        is_lost_N = list(self.is_lost_N)
        for i, baseline in enumerate(greedy_N):
            if math.isnan(baseline) and not math.isnan(rewards_N[i]):
                rewards_N[i] = math.nan
                errors[i] = f"its greedy response: {why_G[i // group_size]}"
                is_lost_N[i] = greedy.is_lost_N[i // group_size]
        return replace(
            self, rewards_N=rewards_N, errors=errors, greedy_N=greedy_N, is_lost_N=is_lost_N
        )

    def without_penalties(self) -> "Scores":
        """Return the scores with the rewards before penalties."""
        pairs = zip(self.unpenalized_N, self.has_outcome_N, strict=True)
        rewards_N = [reward if has_outcome else math.nan for reward, has_outcome in pairs]
        return replace(self, rewards_N=rewards_N)

    def differ(self, group: Sequence[int], role_part: str = "") -> bool:
        """Return whether the policy can learn from a group: whether rewards differ in it.

        Rewards before penalties count, of samples with an outcome: neither a long answer among
        right ones nor a reward that failed makes a group differ.

        group       indices of its samples
        role_part   number that says which of them are compared (algorithm.role_part)
        """
        has_outcome_N = self.has_outcome_N
        roles_N = self.parts.get(role_part, [0.0] * len(has_outcome_N))
        rewards_of: dict[float, set[float]] = {}
        for i in group:
            if has_outcome_N[i]:
                rewards_of.setdefault(roles_N[i], set()).add(self.unpenalized_N[i])
        return any(len(rewards) > 1 for rewards in rewards_of.values())

    def outcomes(self) -> list[float]:
        """Return the rewards of the samples that have an outcome."""
        return [reward for reward in self.rewards_N if not math.isnan(reward)]

    def means(self) -> dict[str, float]:
        """Return the means of the parts over all samples."""
        return {f"reward/part/{name}": sum(v) / len(v) for name, v in self.parts.items() if v}


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Return the samples of all parts, end to end, in one pass.

    A part of the reward that some of them lack counts as 0 there.
    """
    nums = [len(part.rewards_N) for part in parts]
    names = {name: None for part in parts for name in part.parts}
    by_name = {
        name: _end_to_end(
            part.parts.get(name, [0.0] * num) for part, num in zip(parts, nums, strict=True)
        )
        for name in names
    }
    return Scores(
        _end_to_end(part.rewards_N for part in parts),
        by_name,
        _end_to_end(part.errors or [""] * num for part, num in zip(parts, nums, strict=True)),
        _end_to_end(part.greedy_N for part in parts),
        _end_to_end(part.unpenalized_N for part in parts),
        _end_to_end(part.is_lost_N for part in parts),
    )


def _end_to_end(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))
