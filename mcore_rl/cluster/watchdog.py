"""Ends every process of a session, whatever its parent is.

A process belongs to the session if its environment has the session's tag, or if it has a file
open in the session's folder: a process that sets its title overwrites its environment.

Run as a script with the folder, the parent's pid, a time and a hint, this module waits until the
parent is gone, ends the session, removes the folder and prints what happened, and the hint. It
imports only the standard library.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

TAG = "MCORE_RL_SESSION"
RAY_PROCESSES = ("raylet", "gcs_server")
GRACE_S = 2.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.05
PARENT_POLL_S = 0.5
STOPPED_S = 10.0
"""How long a process of Ray may be stopped (SIGSTOP) before it is killed, as calls wait for it.
Time in which the controller is stopped as well, as by Ctrl-Z, does not count."""
_PF_EXITING = 0x4
"""A bit of the flags in /proc/<pid>/stat (linux/sched.h)."""


def list_session_pids(session: str, excluded_pid: int) -> list[int]:
    """Return the live processes of the session on this machine, except `excluded_pid`."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != excluded_pid:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if _belongs_to(session, folder):
                    pids.append(int(folder.name))
    return pids


def _belongs_to(session: str, proc_folder: Path) -> bool:
    tag = f"{TAG}={session}".encode()
    if tag in (proc_folder / "environ").read_bytes().split(b"\0"):
        return True
    return any(os.readlink(fd).startswith(session) for fd in (proc_folder / "fd").iterdir())


def end_session(session: str) -> None:
    """Wait GRACE_S for the processes to end by themselves, then kill the rest.

    Resource trackers remove the semaphores and shared memory of other processes, and end last.
    """
    if left := _wait_until_gone(session, GRACE_S):
        for pid in left:
            if not _is_resource_tracker(pid):
                _kill(pid)
        for pid in _wait_until_gone(session, KILL_TIMEOUT_S):
            _kill(pid)


def _wait_until_gone(session: str, timeout_s: float) -> list[int]:
    """Return the processes that are left after at most `timeout_s`."""
    until = time.monotonic() + timeout_s
    while (pids := list_session_pids(session, os.getpid())) and time.monotonic() < until:
        time.sleep(POLL_S)
    return pids


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def describe_lost_ray(name: str) -> str:
    """Return the message for the death of one of RAY_PROCESSES."""
    return f"Ray's {name} process died (killed, crashed or out of memory), and every rank with it"


def wait_for_parent(parent: int, stopped_s: float = STOPPED_S) -> str:
    """Return a message that says who died first, once `parent` is gone.

    The order of deaths is watched, because a process that calls Ray after the raylet's death exits
    silently. A killed process with many threads takes a while to end, and its children may end
    first. A process of Ray that is stopped for `stopped_s` is killed.
    """
    killed = f"the controller (process {parent}) was killed, and all that it started is ended"
    poller = select.poll()
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return killed
    poller.register(parent_fd, select.POLLIN)
    ray_fds: dict[str, int] = {}
    stopped_since: dict[str, float] = {}
    lost = ""
    while os.getppid() == parent:
        if len(ray_fds) < len(RAY_PROCESSES):
            _watch_ray(parent, ray_fds, poller)
        _kill_stopped(parent, stopped_since, stopped_s)
        ended = [descriptor for descriptor, _ in poller.poll(PARENT_POLL_S * 1000)]
        gone = [name for name in RAY_PROCESSES if ray_fds.get(name) in ended]
        if gone and not lost:
            parent_ends_too = parent_fd in ended or is_ending(parent)
            lost = (
                describe_joint_death(parent, gone)
                if parent_ends_too
                else describe_lost_ray(gone[0])
            )
        if parent_fd in ended:
            break
        for name in gone:
            poller.unregister(ray_fds[name])
    return lost or killed


def _watch_ray(parent: int, ray_fds: dict[str, int], poller: "select.poll") -> None:
    """Register the Ray processes that `parent` has started since the last call."""
    for name, pid in find_ray_children(parent).items():
        if name not in ray_fds:
            with contextlib.suppress(ProcessLookupError):
                ray_fds[name] = os.pidfd_open(pid)
                poller.register(ray_fds[name], select.POLLIN)


def _kill_stopped(parent: int, since: dict[str, float], stopped_s: float) -> None:
    """Kill Ray processes that have been stopped for `stopped_s`; `since` remembers their names."""
    children = {} if is_stopped(parent) else find_ray_children(parent)
    stopped = {name: pid for name, pid in children.items() if is_stopped(pid)}
    for name in since.keys() - stopped.keys():
        del since[name]
    for name, pid in stopped.items():
        if time.monotonic() - since.setdefault(name, time.monotonic()) >= stopped_s:
            what = f"Ray's {name} process was stopped (state T) for {stopped_s:g} s and is killed"
            print(f"mcore-rl: {what}", file=sys.stderr, flush=True)
            _kill(pid)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def is_ending(pid: int) -> bool:
    """Return whether a process is gone, a zombie or about to end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return True
    state, flags = fields[0], int(fields[6])
    return state in "ZX" or bool(flags & _PF_EXITING)


def describe_joint_death(parent: int, names: list[str]) -> str:
    """Return the message for deaths whose order is unknown."""
    ray_processes = " and ".join(f"Ray's {name} process" for name in names)
    return (
        f"the controller (process {parent}) and {ray_processes} died together (killed or crashed)"
    )


def find_ray_children(parent: int) -> dict[str, int]:
    """Return name -> pid of the Ray processes that `parent` started."""
    pids = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
                if name in RAY_PROCESSES and int(fields.split()[1]) == parent:
                    pids[name] = int(folder.name)
    return pids


if __name__ == "__main__":
    message = wait_for_parent(int(sys.argv[2]), float(sys.argv[3]))
    end_session(sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    print(f"mcore-rl: {message}{sys.argv[4]}", file=sys.stderr)
