"""Says with how many threads a process computes on a CPU, before it loads torch."""

import os
from collections.abc import Mapping

import psutil

THREADS = "OMP_NUM_THREADS"
_COUNTS = (
    THREADS,
    *("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    "RAYON_NUM_THREADS",  # of tokenizers
)
_LEAST_BOUND = 64
_PER_CPU = 4
_WAIT_POLICY = "OMP_WAIT_POLICY"
_QUIET = {_WAIT_POLICY: "passive", "GOMP_SPINCOUNT": "1000"}
"""Threads that have nothing to do sleep after some 20 microseconds, in which the next loop of a
forward pass begins: to wake them takes longer. By default they spin, on cores that other processes
need: beside busy ones, a decode step of a small model then took 50 times as long."""


def take_cores(sharers: int, threads: str | None = None) -> None:
    """Have this process, which has not loaded torch, compute with its part of the machine's cores.

    `sharers` processes, this one included, share them; `threads`, if given, is what each takes.
    """
    os.environ.update(quiet_threads(os.environ))
    os.environ[THREADS] = threads or str(max(1, num_cores() // sharers))


def quiet_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what `environment` lacks to let idle threads sleep; {} if it has them spin."""
    if environment.get(_WAIT_POLICY, "passive") != "passive":
        return {}
    return {name: value for name, value in _QUIET.items() if name not in environment}


def check_threads(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable asks for more threads than a process can have, or for none.

    Each is read by a library of some process; thousands of threads end it with SIGSEGV or a panic.
    """
    most = max(_LEAST_BOUND, _PER_CPU * (os.cpu_count() or 1))
    for name in _COUNTS:
        text = environment.get(name, "")
        if text and not (text.isascii() and text.isdigit() and 0 < int(text) <= most):
            raise ValueError(
                f"{name}={text}: it is for each process, and must be a number from 1 to"
                f" {most} on this machine of {os.cpu_count()} CPUs; unset it, and the processes"
                " share the cores"
            )


def num_cores() -> int:
    """Return the cores that this process may use; two threads of a core are one."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, psutil.cpu_count(logical=False) or usable)
