"""The values of a memory plan: what one kind of rank holds at its fullest moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_rl.config import ParallelConfig

Side = Literal["trainer", "critic", "engine"]
"""The side whose layout decides; ranks on shared GPUs count as the trainer's."""
Uses = dict[str, float]
"""Purpose -> bytes."""


@dataclass(frozen=True)
class RankMemory:
    """The ranks `who` at their fullest moment.

    uses            bytes per purpose, without what the processes themselves take
    num_processes   processes on each of their GPUs
    """

    side: Side
    who: str
    moment: str
    uses: Mapping[str, float]
    num_processes: int = 1

    @property
    def num_bytes(self) -> float:
        return sum(self.uses.values())

    @property
    def largest(self) -> str:
        return max(self.uses, key=lambda what: self.uses[what])


def stage_name(role: str, stage: int, num_stages: int, parallel: ParallelConfig) -> str:
    """The plan's name for the ranks of a pipeline stage."""
    per_stage = parallel.world_size // num_stages
    return f"{role} ranks {stage * per_stage}-{(stage + 1) * per_stage - 1}"


def as_json(ranks: Iterable[RankMemory]) -> list[dict[str, Any]]:
    return [
        {
            "who": rank.who,
            "moment": rank.moment,
            "bytes": round(rank.num_bytes),
            "uses": {what: round(size) for what, size in rank.uses.items()},
        }
        for rank in ranks
    ]
