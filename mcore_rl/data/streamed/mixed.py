"""An endless stream of prompts from one or several streamed data sets, whose state is small.

mixing: which source?  ->  its next row  ->  blank, overlong, passed over? the row after it
                                         ->  a prompt, and its number in the stream
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.data.curriculum import Curriculum
from mcore_rl.data.source import Mixing, StreamPlace
from mcore_rl.data.streamed.prompts import ReadRow, StreamedPrompts
from mcore_rl.types import Prompt
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)
LOG_EVERY = 100_000
"""Prompts between two lines in the log that say how far the sources are."""


@dataclass
class MixedSource:
    """A data set in the stream: its name for messages, its weight, and how far it was drawn."""

    name: str
    weight: float
    prompts: StreamedPrompts
    position: int = 0
    """Rows that were drawn or passed over since the start of the first epoch."""
    skipped: dict[str, int] = field(
        default_factory=lambda: {"blank": 0, "overlong": 0, "by difficulty": 0, "by pass rate": 0}
    )
    """Rows that gave no prompt, by reason."""

    def progress(self) -> str:
        epoch, row = divmod(self.position, self.prompts.num_rows)
        reasons = ", ".join(f"{n} {name}" for name, n in self.skipped.items() if n)
        left_out = f"; left out: {reasons}" if reasons else ""
        return f"{self.name}: epoch {epoch}, {row:,} of {self.prompts.num_rows:,} rows{left_out}"


class MixedPrompts:
    """Prompts by weight of their source, within a curriculum. Threads may share it."""

    def __init__(
        self,
        sources: Sequence[MixedSource],
        seed: int,
        curriculum: Curriculum,
        are_right: Callable[[Scores], Sequence[bool | None]],
        close: Callable[[], None],
    ) -> None:
        """`are_right` says which samples count as solved, None where nobody knows; `close` ends
        what the sources share.
        """
        self._sources = sources
        self._seed = seed
        self._mixing = Mixing([source.weight for source in sources])
        self._curriculum = curriculum
        self._are_right = are_right
        self._close = close
        self._number = 0
        """Prompts handed out since the start."""
        self._open: dict[int, tuple[int, int]] = {}
        """Source and position there of prompts that were begun and not ended, by number."""
        self._again: list[tuple[int, int, int]] = []
        """(number, source, position) of those that were open when the loaded state was saved."""
        self._lock = threading.Lock()

    def take(self, num_items: int) -> list[Prompt]:
        """Begin and end the next prompts."""
        begun = [self.begin() for _ in range(num_items)]
        self.end(number for number, _ in begun)
        return [prompt for _, prompt in begun]

    def begin(self) -> tuple[int, Prompt]:
        """Return the next prompt and its number. A stream that continues from a state saved before
        `end` hands it out again.

        Raises ValueError naming file and row if a row cannot become a prompt, and naming the source
        if a whole epoch of it has no prompt to draw.
        """
        with self._lock:
            while self._again:
                number, source, position = self._again.pop(0)
                prompt = self._sources[source].prompts.read_again(position).prompt
                if prompt is not None:  # it is if data.max_prompt_len is lower now
                    self._open[number] = (source, position)
                    return number, prompt
            number = self._number
            source = self._mixing.next()
            position, prompt = self._draw(self._sources[source])
            self._open[number] = (source, position)
            self._number += 1
            if self._number % LOG_EVERY == 0:
                self._log_progress()
            return number, prompt

    def end(self, positions: Iterable[int]) -> None:
        """Mark begun prompts as used, by number; they are not handed out after a restart."""
        with self._lock:
            for number in positions:
                self._open.pop(number, None)

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        """Learn the scores of the prompts' samples: as many for each, in the order of `prompts`.

        Samples whose reward failed say nothing.
        """
        if not self._curriculum.learns:
            return
        are_right = self._are_right(scores)
        group_size = len(scores.rewards_N) // len(prompts)
        with self._lock:
            for i, prompt in enumerate(prompts):
                group = are_right[i * group_size : (i + 1) * group_size]
                known = [right for right in group if right is not None]
                self._curriculum.note(prompt.index, known)

    def first(self, count: int) -> list[Prompt]:
        """Return up to `count` prompts of the first source's first rows, which stay to be drawn.

        Raises ValueError if a first row of any source cannot become a prompt.
        """
        for other in self._sources[1:]:
            other.prompts.read(0)
        found = []
        source = self._sources[0].prompts
        for position in range(min(source.num_rows, 64)):
            prompt = source.read(position).prompt
            if prompt is not None:
                found.append(prompt)
            if len(found) >= count:
                break
        return found

    def get_place(self) -> StreamPlace:
        """Return how far the stream has come; its positions are the numbers of prompts."""
        with self._lock:
            again = tuple(number for number, _, _ in self._again)
            rows = tuple(source.prompts.num_rows for source in self._sources)
            return StreamPlace(self._number, again, rows)

    def find_epoch(self, position: int) -> tuple[int, int]:
        """Return (source, epoch) of a prompt that was begun and not ended, by its number."""
        with self._lock:
            source, place = self._open[position]
            return source, place // self._sources[source].prompts.num_rows

    def state_dict(self) -> dict[str, Any]:
        """Return positions, open prompts and what the curriculum learned. Safe to call while
        another thread begins and ends prompts.
        """
        with self._lock:
            opened = [(number, *place) for number, place in self._open.items()]
            return {
                "seed": self._seed,
                "number": self._number,
                "counts": list(self._mixing.counts),
                "open": [list(entry) for entry in sorted([*opened, *self._again])],
                "curriculum": self._curriculum.state_dict(),
                "sources": [
                    {
                        "weight": source.weight,
                        "num_rows": source.prompts.num_rows,
                        "digest": source.prompts.digest(),
                        "position": source.position,
                        "skipped": dict(source.skipped),
                    }
                    for source in self._sources
                ],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved. Other weights count from here on.

        Raises ValueError if the state belongs to other data, another seed or another window.
        """
        self._check_state(state)
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.position = saved["position"]
            source.skipped |= saved["skipped"]
        saved_weights = [saved["weight"] for saved in state["sources"]]
        weights = [source.weight for source in self._sources]
        if saved_weights == weights:
            self._mixing.counts = list(state["counts"])
        else:
            _log.info("sources are mixed by weights %s from now on, not %s", weights, saved_weights)
        self._number = state["number"]
        self._open = {}
        self._again = [(number, source, place) for number, source, place in state["open"]]
        self._curriculum.load_state_dict(state["curriculum"])
        self._log_progress()

    def close(self) -> None:
        """End the threads and processes that read and tokenize ahead."""
        self._log_progress()
        for source in self._sources:
            source.prompts.close()
        self._close()

    def _draw(self, source: MixedSource) -> tuple[int, Prompt]:
        num_unusable = 0
        while True:
            position = source.position
            row = source.prompts.read(position)
            source.position += 1
            reason = self._reason_to_skip(row, position // source.prompts.num_rows)
            if source.position % source.prompts.num_rows == 0:
                _log.info("prompts of %s", source.progress())
            if not reason:
                assert row.prompt is not None, row
                return position, row.prompt
            source.skipped[reason] += 1
            num_unusable = 0 if reason == "by pass rate" else num_unusable + 1
            if num_unusable >= source.prompts.num_rows:
                raise ValueError(
                    f"{source.name}: none of its {source.prompts.num_rows:,} rows can be drawn"
                    f" after {self._number:,} prompts ({source.progress()}): raise"
                    " data.max_prompt_len, or widen data.curriculum.stages"
                )

    def _reason_to_skip(self, row: ReadRow, epoch: int) -> str:
        """Return why the row gives no prompt now, a key of `skipped`; empty if it gives one."""
        if row.why_not:
            return row.why_not
        if not self._curriculum.suits(row.difficulty, self._number):
            return "by difficulty"
        return "" if self._curriculum.draws(row.index, epoch) else "by pass rate"

    def _check_state(self, state: Mapping[str, Any]) -> None:
        saved_sources = state.get("sources", ())
        pairs: list[tuple[str, Any, Any]] = [
            ("run.seed", state.get("seed"), self._seed),
            ("streamed data sets", len(saved_sources), len(self._sources)),
        ]
        for source, saved in zip(self._sources, saved_sources, strict=False):
            pairs += [
                (f"rows of {source.name}", saved["num_rows"], source.prompts.num_rows),
                (f"hash of the files of {source.name}", saved["digest"], source.prompts.digest()),
            ]
        for name, there, here in pairs:
            if there != here:
                raise ValueError(
                    f"the checkpoint's data position has {name}: {there}, this run {here}: resume"
                    " with the same data files, run.seed, data.window_mib and data.stream_above, or"
                    " start in a new run.dir, with model.path of what this run exported"
                )

    def _log_progress(self) -> None:
        lines = "; ".join(source.progress() for source in self._sources)
        _log.info("%s prompts drawn from %s", f"{self._number:,}", lines)
