"""Says with how many threads a process computes on a CPU, before it loads torch."""

import os

import psutil

THREADS = "OMP_NUM_THREADS"
_WAIT_POLICY = "OMP_WAIT_POLICY"
QUIET = {_WAIT_POLICY: "passive"}
"""Threads that have nothing to do sleep. By default they spin, on cores that other processes need:
beside busy ones, a decode step of a small model then took 50 times as long."""


def take_cores(sharers: int, threads: str | None = None) -> None:
    """Have this process, which has not loaded torch, compute with its part of the machine's cores.

    `sharers` processes, this one included, share them; `threads`, if given, is what each takes.
    """
    os.environ.setdefault(_WAIT_POLICY, QUIET[_WAIT_POLICY])
    os.environ[THREADS] = threads or str(max(1, num_cores() // sharers))


def num_cores() -> int:
    """Return the cores that this process may use; two threads of a core are one."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, psutil.cpu_count(logical=False) or usable)
