"""Keeps what a web search answered in a file, so that a run can be repeated without the web.

One JSON object a line: {"query", "topk", "hits": [{"document", "score"}, ...]}. A line is appended
in one write; one that a crash cut short is left out.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.process.disk import reporting_full_disk
from mcore_rl.services.search.passages import Hit
from mcore_rl.services.search.wire import make_response, parse_response

MODES = ("record", "replay")


class MissingRecordingError(ValueError):
    """A replay was asked for what was not recorded."""


class Recording:
    """The answers in a file, found by query and number of hits. Threads may share it.

    Memory holds where each answer lies, not the answer.
    """

    def __init__(self, path: Path, mode: str) -> None:
        """Open a file to `record` in, which is created, or to `replay`.

        Raises ValueError if there is no file to replay, or if one of its lines is broken.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}: one of {', '.join(MODES)}")
        if mode == "replay" and not path.is_file():
            raise ValueError(f"--replay={path}: there is no such file; make one by --record={path}")
        self.mode = mode
        self._path = path
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], int] = {}
        self._file = path.open("rb" if mode == "replay" else "a+b")
        end = self._read_places()
        if mode == "record":
            self._file.truncate(end)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, query: str, topk: int) -> list[Hit] | None:
        """Return the recorded hits; None: nothing was recorded.

        Raises MissingRecordingError instead of None in a replay.
        """
        place = self._places.get((query, topk))
        if place is None:
            if self.mode == "replay":
                raise MissingRecordingError(
                    f"{self._path} has no recording of query {query!r} with topk {topk}: the run"
                    " differs from the recorded one; record it again by --record"
                )
            return None
        with self._lock:
            self._file.seek(place)
            line = self._file.readline()
        return parse_response({"result": [json.loads(line)["hits"]]}, 1)[0]

    def add(self, query: str, topk: int, hits: Sequence[Hit]) -> None:
        """Append an answer, unless there is one."""
        assert self.mode == "record", self.mode
        entry = {"query": query, "topk": topk, "hits": make_response([hits], True)["result"][0]}
        line = json.dumps(entry).encode() + b"\n"
        with self._lock, reporting_full_disk(self._path):
            if (query, topk) in self._places:
                return
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            self._places[query, topk] = place

    def close(self) -> None:
        self._file.close()

    def _read_places(self) -> int:
        """Find the answers; return where the last whole line ends."""
        place = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                self._places[entry["query"], entry["topk"]] = place
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._path}:{number}: no recording ({error!r}): delete the line"
                ) from None
            place += len(line)
        return place
