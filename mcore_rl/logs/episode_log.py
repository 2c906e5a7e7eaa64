"""Writes episodes.jsonl: which groups of episodes began, and why each episode ended.

begin --> a row with the prompt and the number of episodes;  end --> a row with a reason per episode

Rows are never taken back, so the file lists the episodes of all launches of a run.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from mcore_rl.logs.rows import RowFile, iter_rows_backward
from mcore_rl.process.errors import describe_error, shorten
from mcore_rl.process.redaction import redact
from mcore_rl.types import Prompt, StoredSample

ABORTED = "aborted"
DROPPED_STALE = "dropped_stale"
_DETAIL_CHARS = 500
"""Most characters of an error, as one error may end all open groups."""


class EpisodeLog:
    """Writes two rows for each group: one when it begins, one when its episodes have ended.

    Calls may come from several threads. A group that an earlier launch left open, because it was
    killed, is ended as aborted.
    """

    def __init__(
        self, path: Path | None = None, last_step: int | None = None, rotate_bytes: int = 0
    ) -> None:
        """Open the file; without a path nothing is written.

        last_step      step of the checkpoint that the run continues from; None starts the file over
        rotate_bytes   see RowFile
        """
        self.step = (last_step or 0) + 1
        """The current step, which is written into each row."""
        self._lock = Lock()
        self._open: dict[int, int] = {}
        """Group -> number of its episodes, until it ends."""
        self._next = 0
        self._is_closed = False
        self._file: RowFile | None = None
        if path is None:
            return
        self._file = RowFile(path, None if last_step is None else sys.maxsize, rotate_bytes)
        if last_step is not None:
            self._take_over(iter_rows_backward(path), last_step)

    def begin(self, prompt: Prompt, num_episodes: int, *, greedy: bool = False) -> int:
        """Write that episodes of a prompt begin; return the number of their group."""
        with self._lock:
            group = self._next
            self._next += 1
            if self._is_closed:
                return group
            self._open[group] = num_episodes
            fields = {"prompt_index": prompt.index, "episodes": num_episodes, "greedy": greedy}
            self._write(group, {**fields, "oldest_open": min(self._open)})
        return group

    def end(self, group: int, reasons: Sequence[str], detail: str = "") -> None:
        """Write why the episodes of a group ended, a reason for each; call it once for a group."""
        with self._lock:
            if self._is_closed:
                return
            num_episodes = self._open.pop(group)
            assert len(reasons) == num_episodes, f"group {group}: {reasons} of {num_episodes}"
            self._write(group, {"ends": list(reasons), **_make_detail(detail)})

    def end_all(self, group: int, reason: str, detail: str = "") -> None:
        """Write the same reason for all episodes of a group."""
        self.end(group, [reason] * self._open.get(group, 0), detail)

    @contextmanager
    def record(
        self, prompts: Sequence[Prompt], num_episodes: int, *, greedy: bool
    ) -> Iterator[list[Any]]:
        """Log the episodes of a block, which appends them to the list in the order of `prompts`.

        If the block raises, the episodes are logged as aborted.
        """
        groups = [self.begin(prompt, num_episodes, greedy=greedy) for prompt in prompts]
        samples: list[Any] = []
        try:
            yield samples
        except BaseException as error:
            for group in groups:
                self.end_all(group, ABORTED, describe_error(error))
            raise
        for place, group in enumerate(groups):
            own = samples[place * num_episodes : (place + 1) * num_episodes]
            self.end(group, list_reasons(own))

    def close(self) -> None:
        """End open groups as aborted, and close the file. Later calls do nothing."""
        for group in list(self._open):
            self.end_all(group, ABORTED, "the run ended")
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()

    def _take_over(self, rows_backward: Iterator[dict[str, Any]], last_step: int) -> None:
        """Go on after an earlier launch, whose rows come from the last one on.

        Rows are read back to the oldest group that was open when the last one began.
        """
        ended: set[int] = set()
        oldest = 0
        for row in rows_backward:
            if "ends" in row:
                ended.add(row["group"])
            elif "episodes" in row:
                if row["group"] not in ended:
                    self._open[row["group"]] = row["episodes"]
                self._next = max(self._next, row["group"] + 1)
                oldest = max(oldest, row.get("oldest_open", 0))
                if row["group"] <= oldest:
                    break
        for group in sorted(self._open):
            self.end_all(group, ABORTED, "the run was killed")
        assert self._file is not None
        self._file.write({"step": self.step, "resumed_after": last_step})

    def _write(self, group: int, fields: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write({"step": self.step, "group": group, **fields})


def list_reasons(samples: Sequence[StoredSample]) -> list[str]:
    return [sample.finish_reason for sample in samples]


def _make_detail(text: str) -> dict[str, str]:
    return {"detail": shorten(redact(text), _DETAIL_CHARS)} if text else {}
