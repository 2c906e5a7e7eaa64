"""The parts a training loop is played with, as Protocols; who plays them is decided in run/commands.py."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    Sample,
    Scores,
    StepStats,
    TokenScores,
    TrainBatch,
    WeightVersion,
)

T = TypeVar("T")
S = TypeVar("S")
Watched = Callable[[Awaitable[T]], T]
"""Runs a coroutine to its end while ranks and engines are watched; raises as soon as one of them is lost."""
Reward = Callable[[Sequence[Sample]], Scores]
"""One reward per sample, in order."""


class Generator(Protocol):
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, *, greedy: bool, seed: int
    ) -> list[Sample]:
        """`num_samples` samples of each prompt, in the order of the prompts."""
        ...

    def idle_share(self) -> float:
        """Share of the time since the last call that an engine was without a request, mean over engines."""
        ...


class Background(Protocol):
    """Samples while the trainer trains."""

    def take(self, version: WeightVersion) -> tuple[list[Sample], Scores, dict[str, float]]:
        """Samples for weights `version` to train on, group by group; metrics of how they came about."""
        ...

    def pause_for_sync(self) -> None:
        """Before weights change: return once what is half done is as they may change."""
        ...

    def resume(self, version: WeightVersion) -> Mapping[str, float]:
        """Once engines serve `version`; metrics of what was half done."""
        ...


class BatchStream(Protocol):
    def next_batch(self, num_sequences: int) -> TrainBatch:
        """Sequences with the loss on their answers, loss weights set."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


class PromptStream(Protocol):
    def take(self, num_items: int) -> list[Prompt]: ...

    def state_dict(self) -> dict[str, Any]: ...


class AdvantageEstimator(Protocol):
    def __call__(
        self, scores: Scores, samples: Sequence[Sample], batch: TrainBatch, /
    ) -> tuple[TrainBatch, Mapping[str, float]]:
        """(the batch that was made of the samples with advantages and what a critic learns, metrics)."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


class Trainer(Protocol):
    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        """Return token-aligned log-probs, with router flips if the batch has the engine's experts."""
        ...

    def train_step(self, batch: TrainBatch) -> StepStats: ...

    def save(self, step: int, state: Mapping[str, Any]) -> None: ...


class Critic(Protocol):
    def compute_values(self, batch: TrainBatch) -> Tensor:
        """values_T; see TrainBatch."""
        ...

    def train_step(self, batch: TrainBatch) -> StepStats: ...

    def save(self, step: int) -> None:
        """Part of the checkpoint of `step`, which counts once the trainer's part is there as well."""
        ...


class BothAtOnce(Protocol):
    def __call__(self, first: Callable[[], T], second: Callable[[], S], /) -> tuple[T, S]: ...


class WeightSync(Protocol):
    def sync(self, version: WeightVersion, probe: TrainBatch) -> Mapping[str, float]:
        """Bring every engine to `version`, see that they and the trainer agree on the sequences of `probe`;
        returns what was measured.
        """
        ...


class Log(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(
        self, step: int, samples: Sequence[Sample], scores: Scores, split: str = "train"
    ) -> None: ...


def in_turn(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    return first(), second()


@dataclass(frozen=True)
class Roles:
    """`both` runs what trainer and critic do: in turn, or at once where they have a GPU each."""

    prompts: PromptStream
    held_out: Sequence[Prompt]
    generator: Generator
    reward: Reward
    advantages: AdvantageEstimator
    trainer: Trainer
    weights: WeightSync
    log: Log
    background: Background | None = None
    """Where samples come from that are drawn beside training; None: each step draws its own."""
    teacher: Callable[[Sequence[Sample]], list[tuple[float, ...]]] | None = None
    """The log-probs that another model gives the response tokens of samples."""
    critic: Critic | None = None
    both: BothAtOnce = in_turn
