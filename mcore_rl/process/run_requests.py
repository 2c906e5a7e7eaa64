"""Passes requests to a running command through files in its run folder, and its answers back.

    requests/open           is there while the command takes requests
    requests/<id>.request   JSON; the command removes it as it takes it
    requests/<id>.answer    JSON; whoever sent the request removes it

Whoever may write into the run folder may send requests; nobody else is asked.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import write_whole

FOLDER = "requests"
TAKEN_S = 20.0
"""How long a command may take to take a request."""
_POLL_S = 0.2


@dataclass(frozen=True)
class RunRequest:
    """Asks a command to do something; `words` say what."""

    id: str
    words: Mapping[str, Any]


class RequestInbox:
    """Where a command takes requests and answers them."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take requests for the block; drop what an earlier command left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)
        write_whole(self._folder / "open", "")
        try:
            yield
        finally:
            (self._folder / "open").unlink(missing_ok=True)

    def take(self) -> list[RunRequest]:
        """Return the requests that have come since the last call."""
        requests = []
        for path in sorted(self._folder.glob("*.request")):
            text = path.read_text()
            path.unlink()
            with contextlib.suppress(ValueError):  # not written by send_request
                words = json.loads(text)
                if isinstance(words, dict):
                    requests.append(RunRequest(path.stem, words))
        return requests

    def answer(self, request: RunRequest, text: str, *, is_done: bool) -> None:
        """Say how a request ended; `is_done` False: it is refused, or failed."""
        said = json.dumps({"text": text, "is_done": is_done})
        write_whole(self._folder / f"{request.id}.answer", said)


def send_request(run_dir: Path, words: Mapping[str, Any], timeout_s: float) -> str:
    """Return what the command that runs in a folder answers to a request.

    Raises ValueError if it refuses the request or takes none, and RuntimeError if it does not
    answer.
    """
    folder = run_dir / FOLDER
    is_open = (folder / "open").exists
    if not is_open():
        raise ValueError(f"no command that takes requests runs in {run_dir}")
    name = uuid.uuid4().hex
    request, answer = folder / f"{name}.request", folder / f"{name}.answer"
    write_whole(request, json.dumps(dict(words)))
    if not _wait(lambda: not request.exists(), TAKEN_S):
        request.unlink(missing_ok=True)
        raise RuntimeError(
            f"the command that runs in {run_dir} took no request for {TAKEN_S:g} s: it was killed,"
            " or hangs (docs/debugging.md)"
        )
    if not _wait(lambda: answer.exists() or not is_open(), timeout_s):
        raise RuntimeError(
            f"the command that runs in {run_dir} took the request, and did not say how it ended"
            f" for {timeout_s:g} s: see {run_dir / 'logs' / 'controller.log'}"
        )
    if not answer.exists():
        raise RuntimeError(
            f"the command that ran in {run_dir} ended before the request was carried out"
        )
    said = json.loads(answer.read_text())
    answer.unlink()
    if not said["is_done"]:
        raise ValueError(said["text"])
    return said["text"]


def _wait(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether something is so within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True
