"""Reads from /proc why a process does nothing, and which processes of a group are stopped.

Waits for processes that were killed; one that the kernel keeps is given up and named.

Counts the restarts of one process; those of the last hour count against a limit.
"""

import logging
import subprocess
import time
from collections import deque
from multiprocessing.process import BaseProcess
from pathlib import Path

KILLED_S = 20.0
"""A killed process ends at once, unless it is in a driver or waits for a disk that is gone."""
_log = logging.getLogger(__name__)


def wait_killed(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str] | BaseProcess",
    name: str,
    timeout_s: float = KILLED_S,
) -> bool:
    """Return whether a process that was sent SIGKILL ended in time; a warning tells if not."""
    if isinstance(process, BaseProcess):
        process.join(timeout_s)
        has_ended = process.exitcode is not None
    else:
        try:
            process.wait(timeout_s)
            has_ended = True
        except subprocess.TimeoutExpired:
            has_ended = False
    if not has_ended:
        _log.warning(
            "%s (process %s) did not end within %g s after it was killed: it hangs in the kernel,"
            " in a driver or at a disk, and is left behind",
            *(name, process.pid, timeout_s),
        )
    return has_ended


HOUR_S = 3600.0


class RestartBudget:
    """The restarts so far: a run of weeks may lose a process now and then, not all the time."""

    def __init__(self) -> None:
        self._taken_s: deque[float] = deque()

    def take(self, most: int) -> bool:
        """Take a restart; return False, and take none, if `most` were taken within an hour."""
        if self.num_recent >= most:
            return False
        self._taken_s.append(time.monotonic())
        return True

    @property
    def num_recent(self) -> int:
        """Restarts within the last hour."""
        while self._taken_s and time.monotonic() - self._taken_s[0] > HOUR_S:
            self._taken_s.popleft()
        return len(self._taken_s)


_WORDS = {
    "T": "is stopped (state T; SIGCONT lets it go on)",
    "t": "is held by a debugger (state t)",
    "D": "waits for a device, such as a disk or a file server (state D)",
}


def describe_state(pid: int) -> str:
    """Return words for the state of a process of this machine that does nothing, otherwise ""."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it is gone, or this system has no /proc
        return ""
    return _WORDS.get(_fields(stat)[0], "")


def find_stopped(group_id: int) -> list[int]:
    """Return the processes of a process group that are stopped."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = _fields((folder / "stat").read_text(errors="replace"))[:3]
        except OSError:  # it ended meanwhile
            continue
        if state == "T" and int(group) == group_id:
            found.append(int(folder.name))
    return found


def _fields(stat: str) -> list[str]:
    """Return the fields after the name: state, parent, process group, ..."""
    return stat.rpartition(")")[2].split()
