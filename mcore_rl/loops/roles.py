"""The roles of the training loop as Protocols; run/commands.py decides which objects play them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    Sample,
    StepStats,
    TokenScores,
    TokenWork,
    TrainBatch,
    WeightVersion,
)
from mcore_rl.types.scores import Scores

T = TypeVar("T")
S = TypeVar("S")
Watched = Callable[[Awaitable[T]], T]
"""Runs a coroutine while ranks and engines are watched; raises as soon as one of them is lost."""
Batch = Any
"""A TrainBatch, or a StoredBatch where samples lie in stores; the roles of a run agree on it."""
Samples = Sequence[Any]
"""Samples, or StoredSamples where samples lie in stores."""
ReadSamples = Callable[[Samples], list[Sample]]
"""Brings samples here, from their stores if they lie in some."""
Reward = Callable[[Samples], Scores]
"""Returns one reward per sample, in order."""
ScoreLater = Callable[[Samples], Awaitable[Scores]]
"""A Reward that an event loop awaits."""


class Generator(Protocol):
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[Any]:
        """Return `num_samples` samples of each prompt, in the order of the prompts.

        for_eval   draw them by the options of evaluations, where these differ from training's
        """
        ...

    def idle_share(self) -> float:
        """Return the share of time since the last call in which an engine had no request.

        The share is a mean over engines.
        """
        ...

    def note_lost(self, num_samples: int) -> None:
        """Count samples that were complete and are lost, so that they are sampled again."""
        ...

    def take_num_lost(self) -> int:
        """Return how many samples were lost and sampled again since the last call."""
        ...


class KeepsSamples:
    """The part of a Generator whose samples are never lost, as this process holds them."""

    def note_lost(self, num_samples: int) -> None:
        raise AssertionError("samples of this process cannot be lost")

    def take_num_lost(self) -> int:
        return 0


class Background(Protocol):
    """Draws samples while the trainer trains."""

    def take(self, version: WeightVersion) -> tuple[list[Any], Scores, dict[str, float]]:
        """Return whole groups of samples for weights `version` to train on, scores and metrics."""
        ...

    def pause_for_sync(self) -> None:
        """Return once weights may change under the responses that are not finished.

        rollout.mode and rollout.partial say whether those are finished, cut off or left alone.
        """
        ...

    def resume(self, version: WeightVersion) -> Mapping[str, float]:
        """Go on with sampling now that engines serve `version`; return metrics of the pause."""
        ...


class BatchStream(Protocol):
    def next_batch(self, num_sequences: int) -> TrainBatch:
        """Return sequences with the loss mask on their answers and loss weights set."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


class PromptStream(Protocol):
    def take(self, num_items: int) -> list[Prompt]: ...

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        """Learn the scores of the samples of `prompts`: as many for each, in their order."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


class AdvantageEstimator(Protocol):
    def __call__(
        self, scores: Scores, samples: Samples, batch: Batch, /
    ) -> tuple[Batch, Mapping[str, float]]:
        """Return (`batch` with advantages and, for a critic, returns; metrics).

        `batch` was made of `samples`.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...


class Trainer(Protocol):
    def compute_logprobs(
        self, batch: Batch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        """Return token-aligned log-probs.

        Router flips are added if the batch has the engine's experts.
        """
        ...

    def train_step(self, batch: Batch) -> StepStats: ...

    def save(self, step: int, state: Mapping[str, Any]) -> None: ...


class Critic(Protocol):
    def compute_values(self, batch: Batch) -> Any:
        """Return values_T (see TrainBatch), a Column for a StoredBatch."""
        ...

    def train_step(self, batch: Batch) -> StepStats: ...

    def save(self, step: int) -> None:
        """Save the critic's part of the checkpoint of `step`.

        The checkpoint is complete once the trainer's part is there as well.
        """
        ...


class BothAtOnce(Protocol):
    def __call__(self, first: Callable[[], T], second: Callable[[], S], /) -> tuple[T, S]: ...


class WeightSync(Protocol):
    def sync(self, version: WeightVersion, probe: Batch) -> Mapping[str, float]:
        """Bring every engine to `version`, compare them with the trainer, and return metrics.

        Engines and trainer score the sequences of `probe`.
        """
        ...


class Log(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(
        self, step: int, samples: Samples, scores: Scores, split: str = "train"
    ) -> None: ...


OnTokens = Callable[[Sequence[tuple[TokenWork, Batch]]], list[tuple[Batch, Any]]]
"""Calls each function on its batch; returns batches with the fields that are set, and the rest."""


def on_tokens_here(works: Sequence[tuple[TokenWork, Batch]]) -> list[tuple[Batch, Any]]:
    """Call the functions in this process; the batches must be TrainBatches."""
    return [function(batch) for function, batch in works]


def in_turn(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """Return (first(), second()), one call after the other."""
    return first(), second()


@dataclass(frozen=True)
class Roles:
    """The objects that play the roles of one run.

    background   draws samples while the trainer trains; None if each step draws its own
    teacher      returns another model's log-probs of the response tokens of samples; of none, if
                 the samples' stores keep them
    on_tokens    computes fields of batches where their tokens are
    both         runs trainer and critic: in turn, or at the same time if each has its own GPUs
    """

    prompts: PromptStream
    held_out: Sequence[Prompt]
    generator: Generator
    reward: Reward
    advantages: AdvantageEstimator
    trainer: Trainer
    weights: WeightSync
    log: Log
    background: Background | None = None
    teacher: Callable[[Samples], list[tuple[float, ...]]] | None = None
    critic: Critic | None = None
    on_tokens: OnTokens = on_tokens_here
    both: BothAtOnce = in_turn
