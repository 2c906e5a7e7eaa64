"""Has several adapters take turns: each step of the loop samples, trains and syncs one of them.

    step        1    2    3    4
    adapter    ada  bob  ada  bob         own prompts, factors, optimizer, version and metrics

The loop knows nothing of it. After the sync that ends a step, whoever must know is told whose turn
the next step is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mcore_rl.data.source import ShuffledStream, StreamPlace
from mcore_rl.loops.roles import Log
from mcore_rl.run.roles.weight_sync import EngineSync
from mcore_rl.types import Prompt, StoredBatch, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores

_OF_ADAPTER = ("reward/", "loss/", "kl/", "logprob_diff/", "train/learning_rate")
"""Begin the names of the metrics that each adapter has under its own name, too."""


class TurnOrder:
    """Whose turn it is."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the adapters, in their order."""
        self.names = tuple(names)
        self._listeners: list[Callable[[str], None]] = []

    def find(self, step: int) -> tuple[str, int]:
        """Return the adapter of a step of the loop, and how many turns it has had by its end."""
        before, number = divmod(step - 1, len(self.names))
        return self.names[number], before + 1

    def tell(self, *listeners: Callable[[str], None]) -> None:
        """Have `listeners` called with the adapter of each step that begins."""
        self._listeners += listeners

    def begin(self, step: int) -> None:
        """Tell everybody whose turn `step` is."""
        name, _ = self.find(step)
        for listener in self._listeners:
            listener(name)


class TurnPrompts:
    """The streams of several adapters as one; implements run.roles.booked.Stream.

    It yields prompts of the adapter that was chosen last, which name it. Each is a source of its
    own. Positions count on over all streams.
    """

    def __init__(
        self, streams: Mapping[str, ShuffledStream[Prompt]], num_rows: Sequence[int]
    ) -> None:
        """`num_rows`: prompts of each stream."""
        self._streams = dict(streams)
        self._names = tuple(streams)
        self._num_rows = tuple(num_rows)
        self._chosen = self._names[0]
        self._position = 0
        self._open: dict[int, tuple[str, int]] = {}
        """The adapter and its stream's own position, by the position of a begun prompt."""

    def choose(self, name: str) -> None:
        """Yield prompts of adapter `name` from now on."""
        self._chosen = name

    def begin(self) -> tuple[int, Prompt]:
        """Return the next prompt's position and the prompt, as ShuffledStream does."""
        name = self._chosen
        own, prompt = self._streams[name].begin()
        position = self._position
        self._position += 1
        self._open[position] = name, own
        return position, replace(prompt, adapter=name)

    def end(self, positions: Iterable[int]) -> None:
        """Mark begun prompts as used."""
        for position in list(positions):
            name, own = self._open.pop(position)
            self._streams[name].end([own])

    def take(self, num_items: int) -> list[Prompt]:
        """Begin and end the next prompts."""
        begun = [self.begin() for _ in range(num_items)]
        self.end(position for position, _ in begun)
        return [prompt for _, prompt in begun]

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        """Change nothing: rewards do not move this order."""

    def close(self) -> None:
        """Do nothing: all prompts are in memory."""

    def get_place(self) -> StreamPlace:
        """Return how far all streams have come."""
        return StreamPlace(self._position, (), self._num_rows)

    def find_epoch(self, position: int) -> tuple[int, int]:
        """Return (number of the adapter, epoch) of a prompt that was begun and not ended."""
        name, own = self._open[position]
        number = self._names.index(name)
        return number, own // self._num_rows[number]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each stream. No prompt may be open: each step ends its own."""
        assert not self._open, sorted(self._open)
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"position": self._position, "adapters": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was saved. Raises ValueError if it belongs to other data."""
        saved = state.get("adapters", {})
        if saved.keys() != self._streams.keys():
            raise ValueError(
                f"the checkpoint's data position is of adapters {list(saved)}, and this run has"
                f" {list(self._streams)}: name the same ones in train.lora.adapters, or start in a"
                " new run.dir"
            )
        for name, stream in self._streams.items():
            stream.load_state_dict(saved[name])
        self._position = state["position"]


class Chooses(Protocol):
    """One of those that must know whose turn it is: ranks, links, the parity check."""

    def choose_adapter(self, name: str) -> None: ...


class TurnSync(EngineSync):
    """Brings engines a version of the adapter that a step has trained; then the next one begins."""

    _turns: TurnOrder | None = None

    def begin_turns(self, turns: TurnOrder | None, step: int, choosing: Sequence[Chooses]) -> None:
        """Let adapters take turns from `step` on, and tell those who choose; None: there is one."""
        self._turns = turns
        if turns is not None:
            turns.tell(*(each.choose_adapter for each in choosing))
            turns.begin(step)

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        """See EngineSync."""
        metrics = super().sync(version, probe)
        if self._turns is not None:
            self._turns.begin(version + 1)
        return metrics


class TurnLog:
    """A log that has an adapter's metrics under its name as well."""

    def __init__(self, log: Log, turns: TurnOrder) -> None:
        self._log = log
        self._turns = turns

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics, and those of the adapter of a step that trained it."""
        own = {}
        if "loss/total" in metrics:
            name, num_turns = self._turns.find(step)
            chosen = {key: metrics[key] for key in metrics if key.startswith(_OF_ADAPTER)}
            own = {f"adapters/{name}/{key}": value for key, value in chosen.items()}
            own[f"adapters/{name}/version"] = float(num_turns)
        self._log.log(step, {**metrics, **own})

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        """Log the samples."""
        self._log.log_samples(step, samples, scores, split)


def log_by_adapter(log: Log, turns: TurnOrder | None) -> Log:
    """Return a log of a run whose adapters take turns; `log` itself without."""
    return log if turns is None else TurnLog(log, turns)
