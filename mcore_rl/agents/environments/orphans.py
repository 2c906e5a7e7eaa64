"""Kills what a worker started, where the keeper that should do it was killed itself."""

import os
import signal
import time

MARK = "MCORE_RL_WORKER"
"""Environment variable that all processes below a worker inherit."""
_DEADLINE_S = 10.0


def kill_marked(mark: str) -> int:
    """Kill the processes whose environment says MARK=`mark`, until none is left; return how many.

    Those that cleared their environment, or belong to another user, are not found.
    """
    entry = f"{MARK}={mark}".encode()
    killed: set[int] = set()
    deadline_s = time.monotonic() + _DEADLINE_S
    while (pids := _marked(entry)) and time.monotonic() < deadline_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(0.005)
    return len(killed)


def _marked(entry: bytes) -> list[int]:
    """Return the processes that have this entry; one that ended has an empty environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
