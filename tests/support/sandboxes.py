"""Workers and boxes for tests of the sandbox."""

import contextlib
import time
from collections.abc import Callable

import psutil

from mcore_rl.services.sandbox.box import ProgramBox
from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import BoxStep, Limits, RunRecord
from mcore_rl.services.sandbox.worker import Worker

PROGRAM = "/box/program.py"


def make_worker(use_cgroups: bool = True) -> Worker:
    """Return a worker for Python and the system's programs; the caller closes it."""
    return Worker(readable_paths({}), use_cgroups)


def run(worker: Worker, source: str, stdin: bytes = b"", limits: Limits | None = None) -> RunRecord:
    """Run a Python program in a box of its own."""
    limits = limits or Limits()
    with ProgramBox(worker, limits) as box:
        box.put({"program.py": source.encode()})
        return box.run(BoxStep(program=PROGRAM, limits=limits), stdin)


def descendants(pid: int) -> list[psutil.Process]:
    """Return all processes below one; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait until `holds` returns true; fail with `what` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s until {what}"
        time.sleep(0.02)
