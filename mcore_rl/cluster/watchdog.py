"""Ends every process of a session, whoever its parent is by now.

They are told by the session's mark in their environment or, as a process that sets its title overwrites that,
by an open file in the session's folder. Run as a script (folder, parent's pid), it waits for its parent to be
gone, then ends the session, removes the folder and says what happened.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "MCORE_RL_SESSION"
RAY_PROCESSES = ("raylet", "gcs_server")
AGAIN = "The same command continues from the newest checkpoint"
GRACE_S = 2.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
PARENT_POLL_S = 0.5
_PF_EXITING = 0x4
"""Of the flags in /proc/<pid>/stat (linux/sched.h)."""


def session_pids(session: str, but: int) -> list[int]:
    """Live processes of the session on this machine, except `but`."""
    mark = f"{MARK}={session}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != but:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                marked = mark in (folder / "environ").read_bytes().split(b"\0")
                if marked or any(
                    os.readlink(fd).startswith(session) for fd in (folder / "fd").iterdir()
                ):
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


def ray_lost(name: str) -> str:
    """What to tell when one of RAY_PROCESSES is gone."""
    return f"Ray's {name} process died (killed, crashed or out of memory), and every rank with it. {AGAIN}"


def wait_for_parent(parent: int) -> str:
    """Return when `parent` is gone, with what to tell about it.

    Where its raylet is gone, Ray ends a process that calls it, without a word: so who went first is noted.
    A killed process with many threads takes a while to end, and its children may be gone before it.
    """
    killed = (
        f"the controller (process {parent}) was killed, and all that it started is ended. {AGAIN}"
    )
    lost = ""
    watched: dict[str, int] = {}
    poller = select.poll()
    try:
        watched[""] = os.pidfd_open(parent)
    except ProcessLookupError:
        return killed
    poller.register(watched[""], select.POLLIN)
    while os.getppid() == parent:
        for name, pid in ray_children(parent).items() if len(watched) <= len(RAY_PROCESSES) else ():
            if name not in watched:
                with contextlib.suppress(ProcessLookupError):
                    watched[name] = os.pidfd_open(pid)
                    poller.register(watched[name], select.POLLIN)
        ended = [descriptor for descriptor, _ in poller.poll(PARENT_POLL_S * 1000)]
        gone = [name for name in RAY_PROCESSES if watched.get(name) in ended]
        if gone and not lost:
            ending = watched[""] in ended or is_ending(parent)
            lost = died_together(parent, gone) if ending else ray_lost(gone[0])
        if watched[""] in ended:
            break
        for name in gone:
            poller.unregister(watched[name])
    return lost or killed


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out, or gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return True
    state, flags = fields[0], int(fields[6])
    return state in "ZX" or bool(flags & _PF_EXITING)


def died_together(parent: int, names: list[str]) -> str:
    """What to tell when it cannot be told who went first."""
    others = " and ".join(f"Ray's {name} process" for name in names)
    return (
        f"the controller (process {parent}) and {others} died together (killed or crashed). {AGAIN}"
    )


def ray_children(parent: int) -> dict[str, int]:
    """Name -> pid of the Ray processes that `parent` started."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
                if name in RAY_PROCESSES and int(fields.split()[1]) == parent:
                    found[name] = int(folder.name)
    return found


if __name__ == "__main__":
    message = wait_for_parent(int(sys.argv[2]))
    end_session(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    print(f"mcore-rl: {message}", file=sys.stderr)
