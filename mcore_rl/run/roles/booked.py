"""Roles that tell the ledger what passes through them; each does nothing else of its own.

stream of prompts --> drawn          trainer, critic --> what a step trained
weight sync       --> sync           recovery        --> trained, faults, recoveries, saves
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol, TypeVar

from mcore_rl.config import Config
from mcore_rl.data.source import StreamPlace
from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger
from mcore_rl.loops.roles import (
    Critic,
    PromptStream,
    Recovery,
    Roles,
    State,
    StoredTrainer,
    WeightSync,
)
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    StepStats,
    StoredBatch,
    StoredColumn,
    TokenScores,
    WeightVersion,
)
from mcore_rl.types.scores import Scores

T = TypeVar("T")


class Stream(PromptStream, Protocol):
    """A run's stream of prompts; see data.source.ShuffledStream."""

    def begin(self) -> tuple[int, Prompt]: ...

    def end(self, positions: Iterable[int]) -> None: ...

    def get_place(self) -> StreamPlace: ...

    def find_epoch(self, position: int) -> tuple[int, int]: ...


class BookedPrompts:
    """Implements PromptStream and OpenPrompts. Its prompts know their position in the stream."""

    def __init__(self, stream: Stream, ledger: RunLedger) -> None:
        self._stream = stream
        self._ledger = ledger

    def take(self, num_items: int) -> list[Prompt]:
        begun = [self._stream.begin() for _ in range(num_items)]
        self._note(begun)
        self._stream.end(position for position, _ in begun)
        return [replace(prompt, position=position) for position, prompt in begun]

    def begin(self) -> tuple[int, Prompt]:
        position, prompt = self._stream.begin()
        self._note([(position, prompt)])
        return position, replace(prompt, position=position)

    def end(self, positions: Sequence[int]) -> None:
        self._stream.end(positions)

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        self._stream.note_scores(prompts, scores)

    def state_dict(self) -> Mapping[str, object]:
        return self._stream.state_dict()

    def _note(self, begun: Sequence[tuple[int, Prompt]]) -> None:
        """Write a record for positions that follow one another in an epoch of a data set."""
        places = [(position, *self._stream.find_epoch(position)) for position, _ in begun]
        runs = groupby(range(len(begun)), lambda i: (places[i][0] - i, *places[i][1:]))
        for (start, source, epoch), numbers in runs:
            run = list(numbers)
            prompts = [begun[i][1].index for i in run]
            self._ledger.note_drawn(start + run[0], prompts, source, epoch)


class BookedTrainer:
    """A trainer whose batches the ledger counts."""

    def __init__(self, trainer: StoredTrainer, ledger: RunLedger) -> None:
        self._trainer = trainer
        self._ledger = ledger

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[StoredColumn]:
        return self._trainer.compute_logprobs(batch, options)

    def train_step(self, batch: StoredBatch) -> StepStats:
        return _train(self._trainer.train_step, batch, self._ledger, is_critic=False)

    def save(self, step: int, state: Mapping[str, object]) -> None:
        self._trainer.save(step, state)


class BookedCritic:
    """A critic whose batches the ledger counts."""

    def __init__(self, critic: Critic, ledger: RunLedger) -> None:
        self._critic = critic
        self._ledger = ledger

    def compute_values(self, batch: StoredBatch) -> StoredColumn:
        return self._critic.compute_values(batch)

    def train_step(self, batch: StoredBatch) -> StepStats:
        return _train(self._critic.train_step, batch, self._ledger, is_critic=True)

    def save(self, step: int) -> None:
        self._critic.save(step)


def _train(
    step: Callable[[StoredBatch], StepStats],
    batch: StoredBatch,
    ledger: RunLedger,
    *,
    is_critic: bool,
) -> StepStats:
    try:
        stats = step(batch)
    except SamplesLostError as lost:
        ledger.note_lost_stores(lost.stores)
        raise
    ledger.note_batch(batch, is_critic=is_critic)
    return stats


class BookedSync:
    """A weight sync that the ledger hears of."""

    def __init__(self, weights: WeightSync, ledger: RunLedger) -> None:
        self._weights = weights
        self._ledger = ledger

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        metrics = self._weights.sync(version, probe)
        self._ledger.note("sync", version=version)
        return metrics


class BookedRecovery:
    """A recovery whose failed and repeated work the ledger hears of."""

    def __init__(self, recovery: Recovery, ledger: RunLedger) -> None:
        self._recovery = recovery
        self._ledger = ledger

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        def train_once() -> T:
            self._ledger.begin_training()
            found = work()
            self._ledger.end_training(step)
            return found

        return self._recovery.train(step, self._watch("train", train_once))

    def repeat(self, work: Callable[[], T]) -> T:
        return self._recovery.repeat(self._watch("sync", work))

    def take_back(self) -> bool:
        return self._recovery.take_back()

    def save(self, step: int, work: Callable[[], None]) -> None:
        self._recovery.save(step, self._watch("save", work))
        self._ledger.note_save(step)

    def note_done(self, step: int, state: State) -> None:
        self._recovery.note_done(step, state)

    def _watch(self, what: str, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work`; its errors and its later calls, which follow a recovery, are noted."""
        was_called = False

        def call_watched() -> T:
            nonlocal was_called
            if was_called:
                self._ledger.note("recovered", work=what)
            was_called = True
            try:
                return work()
            except Exception as error:
                self._ledger.note_fault(what, error)
                raise

        return call_watched


def keep_books(roles: Roles, ledger: RunLedger) -> Roles:
    """Return the roles. Roles through which samples pass tell the ledger about them."""
    return replace(
        roles,
        trainer=BookedTrainer(roles.trainer, ledger),
        critic=None if roles.critic is None else BookedCritic(roles.critic, ledger),
        weights=BookedSync(roles.weights, ledger),
        recovery=BookedRecovery(roles.recovery, ledger),
        ledger=ledger,
    )


def begin_books(config: Config, stream: Stream, ledger: RunLedger, step: int) -> BookedPrompts:
    """Begin the ledger of a launch, and return its stream of prompts, which the ledger sees."""
    ledger.begin(describe_launch(config, stream.get_place(), step))
    return BookedPrompts(stream, ledger)


def describe_launch(config: Config, place: StreamPlace, start_step: int) -> LaunchEntry:
    """Return what a launch of the recipe begins with, its stream of prompts at `place`."""
    rollout = config.rollout
    return LaunchEntry(
        step=start_step,
        next=place.next,
        again=place.again,
        rows=place.rows,
        seed=config.run.seed,
        mode=rollout.mode,
        bound=None if rollout.stale == "correct" else rollout.staleness_bound,
        group_size=rollout.samples_per_prompt,
        passes=(config.train.epochs, config.critic.epochs),
        replaces=rollout.dynamic_sampling,
        role_part=config.algorithm.role_part,
    )
