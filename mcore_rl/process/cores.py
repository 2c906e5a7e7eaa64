"""Sets the number of a process's CPU threads before the process loads torch."""

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
"""Idle threads sleep after about 20 microseconds: the next loop of a forward pass begins sooner,
and waking a thread takes longer. By default idle threads spin on cores that other processes need;
beside busy processes, a decode step of a small model then took 50 times as long."""


def take_cores(sharers: int, threads: str | None = None) -> None:
    """Limit this process, which has not loaded torch, to its share of the machine's cores.

    sharers   processes that share the cores, including this one
    threads   threads of each process, if given
    """
    os.environ.update(quiet_threads(os.environ))
    os.environ[THREADS] = threads or str(max(1, num_cores() // sharers))


def quiet_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables missing in `environment` that let idle threads sleep.

    Returns {} if `environment` asks for spinning threads.
    """
    if environment.get(_WAIT_POLICY, "passive") != "passive":
        return {}
    return {name: value for name, value in _QUIET.items() if name not in environment}


def check_threads(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable asks for no thread, or for more than a process can have.

    Libraries read these variables; thousands of threads end a process with SIGSEGV or a panic.
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
    """Return how many physical cores this process may use."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, psutil.cpu_count(logical=False) or usable)
