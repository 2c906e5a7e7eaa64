"""CPU seconds of processes and of all that they started."""

from collections.abc import Iterable

import psutil


def with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return these processes and those they started. Raises psutil.NoSuchProcess if one ended."""
    parents = [psutil.Process(pid) for pid in pids]
    return [each for parent in parents for each in (parent, *parent.children(recursive=True))]


def cpu_seconds(process: psutil.Process) -> float:
    """Return what a process has used so far, as user and in the kernel."""
    return sum(process.cpu_times()[:2])


def read_by_process(pid: int) -> dict[int, float]:
    """Return what a process and each that it started have used so far, by process id."""
    return {process.pid: cpu_seconds(process) for process in with_children([pid])}
