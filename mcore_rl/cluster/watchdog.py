"""Ends every process of a session, whoever its parent is by now.

They are told by the session's mark in their environment or, as a process that sets its title overwrites that,
by an open file in the session's folder. Run as a script (folder, parent's pid), it waits for its parent to be
gone, then ends the session and removes the folder.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "MCORE_RL_SESSION"
GRACE_S = 2.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
PARENT_POLL_S = 0.5


def session_pids(session: str, but: int) -> list[int]:
    """Live processes of the session on this machine, except `but`."""
    mark = f"{MARK}={session}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != but:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                marked = mark in (folder / "environ").read_bytes().split(b"\0")
                if marked or any(os.readlink(fd).startswith(session) for fd in (folder / "fd").iterdir()):
                    found.append(int(folder.name))
    return found


def end_session(session: str) -> None:
    """Wait GRACE_S for the processes to end by themselves, then kill those that are left."""
    if left := _wait_until_gone(session, GRACE_S):
        for pid in left:
            _kill(pid)
        _wait_until_gone(session, KILL_TIMEOUT_S)


def _wait_until_gone(session: str, timeout_s: float) -> list[int]:
    until = time.monotonic() + timeout_s
    while (pids := session_pids(session, but=os.getpid())) and time.monotonic() < until:
        time.sleep(POLL_S)
    return pids


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    while os.getppid() == int(sys.argv[2]):
        time.sleep(PARENT_POLL_S)
    end_session(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
