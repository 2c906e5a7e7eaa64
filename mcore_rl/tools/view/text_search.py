"""Searches the texts of rows in their file, in pieces of limited time."""

import bisect
import json
import time
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
