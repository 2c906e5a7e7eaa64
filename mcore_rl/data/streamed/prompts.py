"""The prompts of a streamed data set by position, read and tokenized ahead of need."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.data.columns import OURS, Columns, find_value
from mcore_rl.data.prompts import make_prompt
from mcore_rl.data.rows import Row, messages_of, refuse_images
from mcore_rl.data.streamed.windows import RawRow, Windows
from mcore_rl.data.streamed.workers import Result, TokenWorkers
from mcore_rl.types import Prompt

BATCH_ROWS = 64
"""Rows that a worker tokenizes at once."""


@dataclass(frozen=True)
class RowRules:
    """How a row becomes a prompt; the options of the same names in DataConfig."""

    max_prompt_len: int
    overlong: str
    difficulty: str = ""
    """Column of the difficulty; empty: none."""
    named: Columns = OURS
    """Where files have what a prompt is made of. Rows with images or videos are refused."""

    @property
    def columns(self) -> list[str]:
        """The top-level columns that are read."""
        names = [*self.named.needed, *self.named.optional, self.difficulty]
        return list(dict.fromkeys(name.partition(".")[0] for name in names if name))

    def check_columns(self, where: str, names: Sequence[str]) -> None:
        """Raise ValueError if a file's columns lack one that is needed."""
        # With other columns the difficulty may lie in an extra_info that the file does not have.
        is_looked_for = self.difficulty and self.named.are_ours
        needed = [*self.named.needed, *([self.difficulty] if is_looked_for else [])]
        for name in needed:
            # A column of another type, such as JSON text, is looked into row by row.
            column = name.partition(".")[0]
            is_opened = any(other.startswith(f"{column}.") for other in names)
            if (name if is_opened else column) not in names:
                option = " (data.curriculum.column)" if name == self.difficulty else ""
                raise ValueError(
                    f"{where} lacks `{name}`{option}; it has {', '.join(sorted(names))}"
                )


@dataclass(frozen=True)
class ReadRow:
    """A row that was read: its prompt and its difficulty, or `why_not`: "blank" or "overlong"."""

    index: int
    prompt: Prompt | None = None
    difficulty: float = math.nan
    why_not: str = ""


@dataclass(frozen=True)
class _Batch:
    """Rows whose conversations are being tokenized; blank rows have none."""

    start: int
    rows: list[RawRow]
    result: Result


class StreamedPrompts:
    """One data set. Reading positions in order is fast; reading elsewhere loads another window."""

    def __init__(
        self,
        windows: Windows,
        workers: TokenWorkers,
        rules: RowRules,
        lookahead: int,
        first_index: int = 0,
    ) -> None:
        """`lookahead`: rows that are tokenized before they are read. `first_index`: of row 0."""
        self._windows = windows
        self._workers = workers
        self._rules = rules
        self._lookahead = lookahead
        self._first_index = first_index
        self._batches: deque[_Batch] = deque()
        self._head: list[ReadRow] = []
        """The rows of the first batch, once they were waited for."""
        self._end = 0
        """Position after the last batch."""

    @property
    def num_rows(self) -> int:
        return self._windows.num_rows

    def digest(self) -> str:
        """Return a hash of the data set; see RowIndex.digest."""
        return self._windows.digest()

    def read(self, position: int) -> ReadRow:
        """Return the row at a position since the start of the first epoch.

        Raises ValueError naming file and row if it cannot become a prompt.
        """
        while self._batches and self._batches[0].start + len(self._batches[0].rows) <= position:
            self._batches.popleft()
            self._head = []
        if not self._batches or not self._batches[0].start <= position < self._end:
            self._batches.clear()
            self._head = []
            self._end = position
        while self._end - position < max(1, self._lookahead):
            self._submit()
        batch = self._batches[0]
        if not self._head:
            self._head = self._finish(batch)
        return self._head[position - batch.start]

    def read_again(self, position: int) -> ReadRow:
        """Return a row without giving up what was tokenized ahead."""
        return self._finish(self._begin(position, 1))[0]

    def close(self) -> None:
        self._windows.close()

    def _submit(self) -> None:
        batch = self._begin(self._end, BATCH_ROWS)
        self._batches.append(batch)
        self._end += len(batch.rows)

    def _begin(self, position: int, count: int) -> _Batch:
        convert = self._rules.named.convert
        rows = [
            raw if raw.row is None else replace(raw, row=convert(raw.row, raw.where))
            for raw in self._windows.rows(position, count)
        ]
        conversations = [messages_of(raw.row, raw.where) for raw in rows if raw.row is not None]
        return _Batch(position, rows, self._workers.submit(conversations))

    def _finish(self, batch: _Batch) -> list[ReadRow]:
        encoded, error = batch.result()
        present = [raw for raw in batch.rows if raw.row is not None]
        if error:
            raise ValueError(
                f"{present[len(encoded)].where}: the chat template cannot render its `prompt`"
                f" ({error}); correct the row, or leave it out"
            )
        token_ids = iter(encoded)
        return [
            ReadRow(self._first_index + raw.index, why_not="blank")
            if raw.row is None
            else self._make_row(raw.index, raw.where, raw.row, tuple(next(token_ids)))
            for raw in batch.rows
        ]

    def _make_row(self, number: int, where: str, row: Row, token_ids: tuple[int, ...]) -> ReadRow:
        rules = self._rules
        refuse_images(row, where)
        index = self._first_index + number
        difficulty = _number(row, rules.difficulty, where) if rules.difficulty else math.nan
        if len(token_ids) > rules.max_prompt_len:
            if rules.overlong == "error":
                raise ValueError(
                    f"{where}: its prompt has {len(token_ids)} tokens, more than"
                    f" data.max_prompt_len={rules.max_prompt_len}: raise it, or set"
                    " data.overlong=filter"
                )
            return ReadRow(index, why_not="overlong")
        messages = messages_of(row, where)
        return ReadRow(index, make_prompt(index, token_ids, messages, where, row), difficulty)


def _number(row: Row, column: str, where: str) -> float:
    """Return the number in a column, which may lie in mappings ("extra_info.difficulty")."""
    value = find_value(row, column, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{where}: data.curriculum.column={column} is {value!r:.100}, not a finite number;"
            " correct the row or name another column"
        )
    return float(value)
