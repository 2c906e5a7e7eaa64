"""Reads the states of processes, waits for killed ones, and limits restarts per hour.

Python's resource tracker removes names of shared memory and semaphores, here even after SIGKILL:

    this process --+-- pipe --> resource tracker, in a session of its own
    its children --+              unlinks the names of processes that have ended

By default Python starts the tracker in the process group of the process that first needs it. A
SIGKILL to the group then ends the tracker before it removes anything, and /dev/shm fills up.
"""

import logging
import os
import subprocess
import sys
from collections import deque
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mcore_rl.process.clock import now_s

_MAIN = "from multiprocessing.resource_tracker import main; main({})"


def start_resource_tracker() -> None:
    """Start the tracker for this process and its children; call this before there are children.

    The tracker has an empty environment. So it survives when a run's processes are found by a
    variable in their environments and killed.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _MAIN.format(reading)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[reading],
        start_new_session=True,
        env={},
    )
    os.close(reading)
    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd, tracker._pid = writing, process.pid


KILLED_S = 20.0
"""A killed process ends at once, unless it hangs in a driver or waits for a lost disk."""
_log = logging.getLogger(__name__)


def wait_killed(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str] | BaseProcess",
    name: str,
    timeout_s: float = KILLED_S,
) -> bool:
    """Wait for a process that got SIGKILL; return whether it ended in time, and warn if not."""
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
    """Limits restarts per hour: a run of weeks may lose a process now and then, not every hour."""

    def __init__(self) -> None:
        self._taken_s: deque[float] = deque()

    def take(self, most: int) -> bool:
        """Count a restart and return True; after `most` restarts within an hour return False."""
        if self.num_recent >= most:
            return False
        self._taken_s.append(now_s())
        return True

    @property
    def num_recent(self) -> int:
        """The number of restarts within the last hour."""
        while self._taken_s and now_s() - self._taken_s[0] > HOUR_S:
            self._taken_s.popleft()
        return len(self._taken_s)


STOPPED = "is stopped (state T; SIGCONT lets it go on)"
_WORDS = {
    "T": STOPPED,
    "t": "is held by a debugger (state t)",
    "D": "waits for a device, such as a disk or a file server (state D)",
}


def describe_state(pid: int) -> str:
    """Return why a process of this machine stands still; "" if it runs or is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it is gone, or this system has no /proc
        return ""
    return _WORDS.get(_split_fields(stat)[0], "")


def find_stopped(group_id: int) -> list[int]:
    """Return the stopped processes of a process group."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = _split_fields((folder / "stat").read_text(errors="replace"))[:3]
        except OSError:  # it ended meanwhile
            continue
        if state == "T" and int(group) == group_id:
            found.append(int(folder.name))
    return found


def _split_fields(stat: str) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name: state, parent, process group, ..."""
    return stat.rpartition(")")[2].split()
