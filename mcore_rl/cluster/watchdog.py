"""Ends every process of a session: all whose environment carries its mark, whoever their parent is by now.

Run as a script (session, parent's pid), it waits for its parent to be gone, then does that.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "MCORE_RL_SESSION"
GRACE_S = 2.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
PARENT_POLL_S = 0.5


def session_pids(session: str) -> list[int]:
    """Live processes on this machine that were started with MARK=session, other than the caller."""
    wanted = f"{MARK}={session}".encode()
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and int(folder.name) != os.getpid() and wanted in _environment(folder)
    ]


def end_session(session: str) -> None:
    """Wait GRACE_S for the processes to end by themselves, then kill those that are left."""
    if left := _wait_until_gone(session, GRACE_S):
        for pid in left:
            _kill(pid)
        _wait_until_gone(session, KILL_TIMEOUT_S)


def _wait_until_gone(session: str, timeout_s: float) -> list[int]:
    until = time.monotonic() + timeout_s
    while (pids := session_pids(session)) and time.monotonic() < until:
        time.sleep(POLL_S)
    return pids


def _environment(folder: Path) -> list[bytes]:
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile, or is another user's
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    while os.getppid() == int(sys.argv[2]):
        time.sleep(PARENT_POLL_S)
    end_session(sys.argv[1])
