"""An index of samples.jsonl: where each row lies, and the numbers by which rows are filtered.

A row takes about 60 bytes here; its texts stay in the file, where a search reads them.
"""

import bisect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mcore_rl.tools.view.followed import FollowedRows

_CHUNK_BYTES = 4 << 20
_NUMBER = frozenset(b"0123456789.-+e")
_KEYS = (
    b'{"step": , "split": "train", "prompt_index": , "prompt": "", "response": "", "reward": ,'
    b' "sample_index": , "response_len": , "ground_truth": "", "finish_reason": "stop", "weights":'
    b' [], "parts": {}, "advantage": , "token_rows": [], "texts": [], "logprobs": [], "trained":'
    b' [[, ]], "versions": , "turns": [], "parent": null, "fork": "", "messages": [], "role":'
    b' "user" "assistant" "tool" "system", "content": "", "answer": {}, "calls": [], "tokens": ,'
    b' "detail": "", "images": "images/.png", "reward_error": "", true, false, "eval", "length"'
)
"""Text that rows have in keys and numbers: only a row that was parsed tells where it occurs."""


class TextSearch:
    """The rows that contain a text in one of their strings; A to Z are equal to a to z."""

    def __init__(self, text: str) -> None:
        self._text = text.encode(errors="surrogatepass").lower()
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        self._needle = escaped.encode(errors="surrogatepass").lower()
        self._may_be_key = self._needle in _KEYS or set(self._needle) <= _NUMBER
        self._hits = np.zeros(0, bool)
        self.num_searched = 0

    def is_hit(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return for each row number whether the row was searched and has the text."""
        known = rows < len(self._hits)
        hits = np.zeros(len(rows), bool)
        hits[known] = self._hits[rows[known]]
        return hits

    def go_on(
        self,
        file: FollowedRows,
        positions: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        deadline_s: float,
    ) -> None:
        """Search further rows until the deadline of time.monotonic(), a chunk at least."""
        num_rows = len(positions)
        self._hits = np.concatenate([self._hits, np.zeros(num_rows - len(self._hits), bool)])
        bases = file.list_bases()
        while self.num_searched < num_rows:
            first = self.num_searched
            start = int(positions[first])
            part = bisect.bisect_right(bases, start)
            limit = start + max(_CHUNK_BYTES, int(lengths[first]))
            if part < len(bases):
                limit = min(limit, bases[part])
            ends = positions[first:] + lengths[first:]
            stop = first + max(1, int(np.searchsorted(ends, limit, side="right")))
            size = int(positions[stop - 1] + lengths[stop - 1]) - start
            self._search(file.read_at(start, size), positions[first:stop] - start, lengths, first)
            self.num_searched = stop
            if time.monotonic() > deadline_s:
                return

    def _search(
        self,
        chunk: bytes,
        starts: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        first: int,
    ) -> None:
        lowered = chunk.lower()
        begins = starts.tolist()
        at = lowered.find(self._needle)
        while at >= 0:
            place = bisect.bisect_right(begins, at) - 1
            begin = begins[place]
            end = begin + int(lengths[first + place])
            if at + len(self._needle) <= end:
                found = not self._may_be_key or self._is_in_text(chunk[begin:end])
                self._hits[first + place] = found
            at = lowered.find(self._needle, max(end, at + 1))

    def _is_in_text(self, line: bytes) -> bool:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = json.loads(line)
        for name in ("split", "finish_reason", "token_rows", "images"):
            row.pop(name, None)
        return self._occurs(row)

    def _occurs(self, value: object) -> bool:
        if isinstance(value, str):
            return self._text in value.encode(errors="surrogatepass").lower()
        if isinstance(value, dict):
            return any(self._occurs(inner) for inner in value.values())
        return isinstance(value, list) and any(self._occurs(inner) for inner in value)


CUT_OFF = ("length", "max_tokens", "max_turns", "deadline")
"""Why responses and episodes end before the policy ends them: types.CUT_OFF, without torch."""
_COLUMNS = np.dtype(
    [
        ("position", "i8"),
        ("bytes", "i4"),
        ("step", "i8"),
        ("prompt", "i8"),
        ("reward", "f8"),
        ("length", "i8"),
        ("split", "i2"),
        ("reason", "i2"),
        ("turns", "i2"),
        ("failed", "?"),
        ("images", "?"),
        ("tokens", "?"),
    ]
)
SEARCH_S = 0.25
"""Seconds that a request may search texts; the next one goes on."""
ODD_ROW = (AttributeError, OverflowError, TypeError, ValueError)
"""Raised for a row whose values are of other types than those of a log."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Filter:
    """Bounds are inclusive; None, "" and False filter nothing."""

    split: str = ""
    reason: str = ""
    text: str = ""
    first_step: float | None = None
    last_step: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    prompt: float | None = None
    truncated: bool = False
    failed: bool = False
    with_tokens: bool = False


@dataclass(frozen=True)
class Found:
    """Numbers of rows, in order, and how many of all rows were searched for the text."""

    rows: np.ndarray[Any, Any]
    num_searched: int


class SampleIndex:
    """Indexes the samples of a run folder, and those that are added."""

    def __init__(self, run_dir: Path) -> None:
        self._file = FollowedRows(run_dir / "samples.jsonl")
        self._forget()

    def _forget(self) -> None:
        self._table = np.zeros(1024, _COLUMNS)
        self.num_rows = 0
        self.num_bad = 0
        self.counts_tokens = True
        self._codes: dict[str, list[str]] = {"split": [], "reason": []}
        self._searches: dict[str, TextSearch] = {}

    def refresh(self) -> bool:
        """Index further rows, of a block at most; return whether all are."""
        new = self._file.read_new()
        if new.is_restart:
            self._forget()
        for position, line in new.lines:
            try:
                self._add(position, len(line), read_row(line))
            except ODD_ROW:
                self.num_bad += 1
        return new.is_end

    def names(self, column: str) -> list[str]:
        """Return the values of `split` or `reason` that occur."""
        return list(self._codes[column])

    @property
    def columns(self) -> np.ndarray[Any, Any]:
        return self._table[: self.num_rows]

    def find(self, wanted: Filter) -> Found:
        """Return the rows that fit, the oldest first; a search of a long file is not finished."""
        rows = np.flatnonzero(self._select(wanted))
        if not wanted.text:
            return Found(rows, self.num_rows)
        search = self._searches.pop(wanted.text, None) or TextSearch(wanted.text)
        self._searches[wanted.text] = search
        if len(self._searches) > 4:
            del self._searches[next(iter(self._searches))]
        table = self.columns
        search.go_on(self._file, table["position"], table["bytes"], time.monotonic() + SEARCH_S)
        return Found(rows[search.is_hit(rows)], search.num_searched)

    def read(self, number: int) -> Row:
        """Return a row of the file. Raises LookupError if there is none of that number."""
        if not 0 <= number < self.num_rows:
            raise LookupError(f"no sample {number}; there are {self.num_rows}")
        place = self._table[number]
        row = parse_row(self._file.read_at(int(place["position"]), int(place["bytes"])))
        if row is None:
            raise LookupError(f"sample {number} is no longer in the file")
        return row

    def sort(self, rows: np.ndarray[Any, Any], column: str) -> np.ndarray[Any, Any]:
        """Return row numbers sorted by a column; a leading "-": the largest first."""
        name = column.removeprefix("-")
        if name not in ("step", "reward", "length", "prompt", "turns"):
            raise ValueError(f"sort={column}: step, reward, length, prompt or turns, or -step, ...")
        values = self.columns[name][rows].astype(float)
        values = np.where(np.isnan(values), np.inf, -values if column.startswith("-") else values)
        return rows[np.argsort(values, kind="stable")]

    def _select(self, wanted: Filter) -> np.ndarray[Any, Any]:
        table = self.columns
        fits = np.ones(len(table), bool)
        for column, low, high in (
            ("step", wanted.first_step, wanted.last_step),
            ("reward", wanted.min_reward, wanted.max_reward),
            ("length", wanted.min_length, wanted.max_length),
            ("prompt", wanted.prompt, wanted.prompt),
        ):
            if low is not None:
                fits &= table[column] >= low
            if high is not None:
                fits &= table[column] <= high
        for name in ("split", "reason"):
            if value := getattr(wanted, name):
                fits &= np.isin(table[name], self._find_codes(name, (value,)))
        if wanted.truncated:
            fits &= np.isin(table["reason"], self._find_codes("reason", CUT_OFF))
        if wanted.failed:
            fits &= table["failed"]
        if wanted.with_tokens:
            fits &= table["tokens"]
        return fits

    def _find_codes(self, column: str, names: Sequence[str]) -> list[int]:
        return [code for code, name in enumerate(self._codes[column]) if name in names]

    def _add(self, position: int, num_bytes: int, row: Row) -> None:
        if self.num_rows == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        reward = row.get("reward")
        turns = row.get("turns") or ()
        self._table[self.num_rows] = (
            position,
            num_bytes,
            row.get("step", 0),
            row.get("prompt_index", -1),
            float("nan") if reward is None else reward,
            self._measure(row, turns),
            self._code("split", row.get("split", "")),
            self._code("reason", row.get("finish_reason", "")),
            min(len(turns), 32767),
            "reward_error" in row,
            "images" in row,
            "token_rows" in row,
        )
        self.num_rows += 1

    def _measure(self, row: Row, turns: Sequence[Mapping[str, Any]]) -> int:
        """Return tokens; of single responses of older versions, which have none, characters."""
        if "response_len" in row:
            return row["response_len"]
        if turns:
            return sum(turn.get("tokens", 0) for turn in turns)
        self.counts_tokens = False
        return len(row.get("response", ""))

    def _code(self, column: str, name: str) -> int:
        known = self._codes[column]
        if name not in known:
            known.append(name)
        return known.index(name)


def read_row(line: bytes) -> Row:
    """Return the row of a line. Raises ValueError if the line is no JSON object."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:  # a lone surrogate, which the standard library reads
        row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"no object: {line[:80]!r}")
    return row


def parse_row(line: bytes) -> Row | None:
    """Return the row of a line, None if the line is no JSON object."""
    try:
        return read_row(line)
    except ValueError:
        return None
