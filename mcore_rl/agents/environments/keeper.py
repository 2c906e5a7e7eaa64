"""Starts one worker, and ends with it and with every process below it when the pool is gone.

Run as `python -m mcore_rl.agents.environments.keeper --pool-pid N --alive-fd N --socket-fd N
[--memory-bytes N] <command of the worker>`. The worker runs foreign code, which may hang, hold
Python's lock or start processes that detach themselves. This process does nothing but wait, so it
can always clean up. It bounds the resident memory, as RLIMIT_AS counts address space, of which many
libraries reserve far more than they use, and does not count child processes.
"""

import argparse
import ctypes
import os
import select
import signal
import stat
import sys
import time

from mcore_rl.process.parent_death import die_with_parent

OVER_MEMORY_STATUS = 77
"""Exit status of a keeper whose worker and the processes below it took too much memory."""
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_EVERY_S = 0.5
_KILL_DEADLINE_S = 10.0
_LOG_BYTES = 64 * 1024 * 1024
"""A longer log of the worker begins anew."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def list_descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, itself excluded, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _find_parent(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is read
        found.extend(children.get(child, ()))
    return found


def count_resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of these processes; pages that they share count once for each."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                pages += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pages * _PAGE_BYTES


def _find_parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _kill_all_below() -> None:
    """Kill until nothing is left: what forks meanwhile is found the next time."""
    deadline_s = time.monotonic() + _KILL_DEADLINE_S
    while (pids := list_descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.005)


def _reap(wanted_pid: int = 0) -> int | None:
    """Collect children that ended, orphans included; return the status of `wanted_pid`, if it did.

    As a shell does, 128 + signal stands for a process that was killed.
    """
    status = None
    while True:
        try:
            pid, waited = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == wanted_pid:
            code = os.waitstatus_to_exitcode(waited)
            status = code if code >= 0 else 128 - code


def _watch(worker_pid: int, alive_fd: int, signal_fd: int, memory_bytes: int) -> int:
    """Return the status to end with: the worker's, 128 + the number of a signal to this process,
    OVER_MEMORY_STATUS, or 0 if the pool is gone.
    """
    poll = select.poll()
    poll.register(alive_fd, select.POLLIN | select.POLLHUP)
    poll.register(signal_fd, select.POLLIN)
    poll.register(os.pidfd_open(worker_pid), select.POLLIN)
    while True:
        events = poll.poll(_LOOK_EVERY_S * 1000)
        status = _reap(worker_pid)
        if status is not None:
            return status
        ready = [fd for fd, _ in events]
        if signal_fd in ready:
            return 128 + os.read(signal_fd, 1)[0]
        if alive_fd in ready:
            return 0
        if _is_large(sys.stdout.fileno()):
            os.ftruncate(sys.stdout.fileno(), 0)  # whoever writes appends, so the file starts anew
        if memory_bytes and count_resident_bytes(list_descendants(os.getpid())) > memory_bytes:
            print(f"over {memory_bytes} bytes of memory: the worker is killed", flush=True)
            return OVER_MEMORY_STATUS


def _is_large(log_fd: int) -> bool:
    found = os.fstat(log_fd)
    return stat.S_ISREG(found.st_mode) and found.st_size > _LOG_BYTES


def _signals_as_bytes() -> int:
    """Return what to read the number of each signal from.

    A handler that raises would interrupt the killing, too.
    """
    signal_fd, wakeup_fd = os.pipe()
    os.set_blocking(wakeup_fd, False)
    signal.set_wakeup_fd(wakeup_fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return signal_fd


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool-pid", type=int, required=True)
    parser.add_argument("--alive-fd", type=int, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    signal_fd = _signals_as_bytes()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    die_with_parent(given.pool_pid, signal.SIGTERM)
    os.set_inheritable(given.alive_fd, False)
    try:
        command = [*given.command, "--keeper-pid", str(os.getpid())]
        worker_pid = os.posix_spawn(command[0], command, os.environ)
        os.close(given.socket_fd)  # the pool reads the end of the file when the worker dies
        return _watch(worker_pid, given.alive_fd, signal_fd, given.memory_bytes)
    finally:
        _kill_all_below()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
