"""Searches the web through an HTTP API that answers JSON, such as serper.dev's; a Retriever.

query --> recording, or the service --> hits whose contents are "title\\nsnippet"

A recording keeps the answers in a file, so that a run can be repeated without the web. It has one
JSON object a line: {"query", "topk", "hits": [{"document", "score"}, ...]}. A line is appended in
one write; a line that a crash cut short is left out.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from mcore_rl.process.disk import report_full_disk
from mcore_rl.services.search.client import Ask, ask_json, make_response, parse_response
from mcore_rl.services.search.layout import Hit

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
        with self._lock, report_full_disk(self._path):
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


@dataclass(frozen=True)
class WebOptions:
    """A service for web searches. The defaults are those of serper.dev.

    key, key_header   the key, and the header that brings it; an empty key is not sent
    method            POST: the query is sent as JSON; GET: as parameters of the URL
    query_field, num_field
                      names of the query and of the number of results; empty num_field: not sent
    fields            sent besides, such as {"gl": "us"}
    results           where the list of results lies in the answer, keys joined by dots
    title, text, link fields of a result
    deadline_s        for one query, with all attempts
    """

    url: str = "https://google.serper.dev/search"
    key: str = field(default="", repr=False)
    key_header: str = "X-API-KEY"
    method: str = "POST"
    query_field: str = "q"
    num_field: str = "num"
    fields: Mapping[str, Any] = field(default_factory=dict)
    results: str = "organic"
    title: str = "title"
    text: str = "snippet"
    link: str = "link"
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if self.method not in ("GET", "POST"):
            raise ValueError(f"method is {self.method!r}: GET or POST")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: it must begin with http:// or https://")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s is {self.deadline_s}: more than 0 seconds")


class WebSearch:
    """Asks the service, or the recording. Threads may share it."""

    name = "web"
    num_passages = 0

    def __init__(self, options: WebOptions, recording: Recording | None) -> None:
        """Without a recording every query goes to the service."""
        self._options = options
        self._recording = recording

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See index.Retriever.

        Raises SearchUnavailableError if the service does not answer in time, ValueError if it
        refuses or answers otherwise, MissingRecordingError if a replay lacks a query.
        """
        return [self._one(query, topk) for query in queries]

    def _one(self, query: str, topk: int) -> list[Hit]:
        if self._recording is None:
            return self._ask(query, topk)
        found = self._recording.find(query, topk)
        if found is None:
            found = self._ask(query, topk)
            self._recording.add(query, topk, found)
        return found

    def _ask(self, query: str, topk: int) -> list[Hit]:
        options = self._options
        asked = {options.query_field: query, **options.fields}
        if options.num_field:
            asked[options.num_field] = topk
        headers = {options.key_header: options.key} if options.key else {}
        is_get = options.method == "GET"
        separator = "&" if "?" in options.url else "?"
        url = f"{options.url}{separator}{urlencode(asked)}" if is_get else options.url
        answer = ask_json(Ask(url, None if is_get else asked, headers, options.deadline_s))
        results = _under(answer, options.results)
        if not isinstance(results, list):
            raise ValueError(
                f"{options.url} answers without a list at {options.results!r}:"
                f" {str(answer)[:200]!r}; say where the results lie by --web-results"
            )
        return [self._hit(result, rank) for rank, result in enumerate(results[:topk], start=1)]

    def _hit(self, result: Mapping[str, Any], rank: int) -> Hit:
        options = self._options
        title = str(result.get(options.title) or "")
        text = str(result.get(options.text) or "")
        document = {"id": str(result.get(options.link) or rank), "contents": f'"{title}"\n{text}'}
        return Hit(document, 1.0 / rank)


def _under(answer: Any, path: str) -> Any:
    """Return what lies at keys joined by dots; a service leaves out a list without results."""
    *outer, last = path.split(".")
    for key in outer:
        answer = answer.get(key) if isinstance(answer, dict) else None
    return answer.get(last, []) if isinstance(answer, dict) else None
