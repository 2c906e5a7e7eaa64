"""The roles of the loops as Protocols; run/commands.py decides which objects implement them.

The loop of reinforcement learning works on StoredSamples and StoredBatches, whose tokens lie in
sample stores. Those of supervised fine-tuning and preferences work on TrainBatches, with tokens.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    Sample,
    StepStats,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TokenScores,
    TokenWork,
    TrainBatch,
    WeightVersion,
)
from mcore_rl.types.scores import Scores

T = TypeVar("T")
S = TypeVar("S")
Batch = TypeVar("Batch", bound=TrainBatch | StoredBatch, contravariant=True)
Values = TypeVar("Values", bound=Tensor | StoredColumn, covariant=True)
State = Mapping[str, object]
"""The part of a checkpoint that a role continues from, as JSON."""
ReadSamples = Callable[[Sequence[StoredSample]], list[Sample]]
"""Brings samples here from their stores."""
Reward = Callable[[Sequence[StoredSample]], Scores]
"""Returns one reward per sample, in order."""
ScoreLater = Callable[[Sequence[StoredSample]], Awaitable[Scores]]
"""A Reward that an event loop awaits."""
AskTeacher = Callable[[Sequence[StoredSample]], None]
"""Has the stores of samples keep another model's log-probs of their tokens."""


class Watched(Protocol):
    """Runs a coroutine while ranks and engines are watched; raises as soon as one is lost."""

    def __call__(self, work: Awaitable[T], /) -> T: ...


class Generator(Protocol):
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[StoredSample]:
        """Return `num_samples` samples of each prompt, in the order of the prompts.

        for_eval   draw them by the options of evaluations, where these differ from training's
        """
        ...

    def measure_engines(self) -> dict[str, float]:
        """Return metrics of the engines since the last call.

        They are the share of time without a request, mean over engines, and how far the slowest
        engine lags behind the others.
        """
        ...

    def note_lost(self, num_samples: int) -> None:
        """Count samples that were complete and are lost, so that they are sampled again."""
        ...

    def take_num_lost(self) -> int:
        """Return how many samples were lost and sampled again since the last call."""
        ...


class Background(Protocol):
    """Draws samples while the trainer trains."""

    def take(self, version: WeightVersion) -> tuple[list[StoredSample], Scores, dict[str, float]]:
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

    def keep(self, step: int) -> None:
        """Keep finished samples with the checkpoint of `step`, for a run that is resumed."""
        ...


class BatchStream(Protocol):
    def next_batch(self, num_sequences: int) -> TrainBatch:
        """Return sequences with the loss mask on their answers and loss weights set."""
        ...

    def state_dict(self) -> State: ...


class PromptStream(Protocol):
    def take(self, num_items: int) -> list[Prompt]: ...

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        """Learn the scores of the samples of `prompts`: as many for each, in their order."""
        ...

    def state_dict(self) -> State: ...


class AdvantageEstimator(Protocol):
    def __call__(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch, /
    ) -> tuple[StoredBatch, Mapping[str, float]]:
        """Return (`batch` with advantages and, for a critic, returns; metrics).

        `batch` was made of `samples`.
        """
        ...

    def state_dict(self) -> State: ...


class Trainer(Protocol[Batch, Values]):
    def compute_logprobs(
        self, batch: Batch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[Values]:
        """Return token-aligned log-probs.

        Router flips are added if the batch has the engine's experts.
        """
        ...

    def train_step(self, batch: Batch) -> StepStats: ...

    def save(self, step: int, state: State) -> None: ...


TokenTrainer = Trainer[TrainBatch, Tensor]
"""Trains on batches that have their tokens: supervised fine-tuning and preferences."""
StoredTrainer = Trainer[StoredBatch, StoredColumn]
"""Trains on batches whose tokens lie in stores: reinforcement learning."""


class Critic(Protocol):
    def compute_values(self, batch: StoredBatch) -> StoredColumn:
        """Return values_T (see TrainBatch)."""
        ...

    def train_step(self, batch: StoredBatch) -> StepStats: ...

    def save(self, step: int) -> None:
        """Save the critic's part of the checkpoint of `step`.

        The checkpoint is complete once the trainer's part is there as well.
        """
        ...


class BothAtOnce(Protocol):
    def __call__(self, first: Callable[[], T], second: Callable[[], S], /) -> tuple[T, S]: ...


class WeightSync(Protocol):
    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        """Bring every engine to `version`, compare them with the trainer, and return metrics.

        Engines and trainer score some sequences of `probe`.
        """
        ...


class Recovery(Protocol):
    """Replaces lost ranks of trainer and critic, which then go on from the last state kept."""

    def train(self, step: int, work: Callable[[], T], /) -> tuple[T, Mapping[str, float]]:
        """Return work(), which trains `step`, and metrics of the state that is kept after it.

        If ranks are lost meanwhile, they are recovered as they were, and `work` is called again.
        """
        ...

    def repeat(self, work: Callable[[], T], /) -> T:
        """Return work(), which trains nothing. If ranks are lost meanwhile, call `work` again."""
        ...

    def take_back(self) -> bool:
        """Undo what failed work of `train` has trained; return False if that is not possible."""
        ...

    def save(self, step: int, work: Callable[[], None]) -> None:
        """Call `work`, which begins to save `step`; again if ranks are lost before it is done."""
        ...

    def note_done(self, step: int, state: State, /) -> None:
        """Note that nothing of `step` is left to do, and what a start after it continues from."""
        ...


class NoRecovery:
    """A Recovery of ranks that are not replaced: their loss ends the run."""

    def train(self, step: int, work: Callable[[], T], /) -> tuple[T, Mapping[str, float]]:
        return work(), {}

    def repeat(self, work: Callable[[], T], /) -> T:
        return work()

    def take_back(self) -> bool:
        return False

    def save(self, step: int, work: Callable[[], None]) -> None:
        work()

    def note_done(self, step: int, state: State, /) -> None: ...


NO_RECOVERY = NoRecovery()


class Log(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None: ...


class OnTokens(Protocol):
    """Calls each function on its batch where the batch's tokens are.

    Returns the batches with the fields that the functions set, and what else they return.
    """

    def __call__(
        self, works: Sequence[tuple[TokenWork[T], StoredBatch]], /
    ) -> list[tuple[StoredBatch, T]]: ...


def in_turn(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """Return (first(), second()), one call after the other."""
    return first(), second()


@dataclass(frozen=True)
class Roles:
    """The objects that implement the roles of one run.

    background   draws samples while the trainer trains; None if each step draws its own
    teacher      None if the recipe has no teacher
    on_tokens    computes fields of batches where their tokens are
    both         runs trainer and critic: in turn, or at the same time if each has its own GPUs
    recovery     replaces lost ranks of trainer and critic
    ledger       keeps the books of prompts and samples
    """

    prompts: PromptStream
    held_out: Sequence[Prompt]
    generator: Generator
    reward: Reward
    advantages: AdvantageEstimator
    trainer: StoredTrainer
    weights: WeightSync
    log: Log
    on_tokens: OnTokens
    background: Background | None = None
    teacher: AskTeacher | None = None
    critic: Critic | None = None
    both: BothAtOnce = in_turn
    recovery: Recovery = NO_RECOVERY
    ledger: RunLedger = field(default_factory=RunLedger)
