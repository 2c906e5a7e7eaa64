"""Keeps the rewards of samples, and what they were made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENVIRONMENT = "environment"
"""The part of a reward that an episode's environment gives."""


@dataclass(frozen=True)
class Scores:
    """The rewards of samples; every list has an entry per sample.

    parts    the numbers that rewards were made of, by name
    errors   why a sample has no reward of its own; empty where it has
    greedy_N the reward of the greedy response to the same prompt, where it was asked for
    teacher_N the teacher's log-prob of each response token, where there is a teacher
    unpenalized_N the reward before penalties; rewards_N itself if not given
    """

    rewards_N: list[float]
    parts: Mapping[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    greedy_N: list[float] = field(default_factory=list)
    teacher_N: list[tuple[float, ...]] = field(default_factory=list)
    unpenalized_N: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.unpenalized_N:
            object.__setattr__(self, "unpenalized_N", list(self.rewards_N))

    def select(self, indices: Sequence[int]) -> "Scores":
        def pick(values: list[Any]) -> list[Any]:
            return [values[i] for i in indices] if values else []

        parts = {name: pick(values) for name, values in self.parts.items()}
        return Scores(
            pick(self.rewards_N),
            parts,
            pick(self.errors),
            pick(self.greedy_N),
            pick(self.teacher_N),
            pick(self.unpenalized_N),
        )

    def joined(self, other: "Scores") -> "Scores":
        """Return the samples of both; a part that one of them lacks counts as 0 there."""
        here, there = len(self.rewards_N), len(other.rewards_N)
        parts = {
            name: [*self.parts.get(name, [0.0] * here), *other.parts.get(name, [0.0] * there)]
            for name in {**self.parts, **other.parts}
        }
        errors = (self.errors or [""] * here) + (other.errors or [""] * there)
        greedy_N = self.greedy_N + other.greedy_N
        teacher_N = self.teacher_N + other.teacher_N
        rewards_N = self.rewards_N + other.rewards_N
        unpenalized_N = self.unpenalized_N + other.unpenalized_N
        return Scores(rewards_N, parts, errors, greedy_N, teacher_N, unpenalized_N)

    def metrics(self) -> dict[str, float]:
        """Return the means of the parts and the number of samples that failed."""
        means = {f"reward/part/{name}": sum(v) / len(v) for name, v in self.parts.items() if v}
        return {**means, "reward/errors": float(sum(map(bool, self.errors)))}
