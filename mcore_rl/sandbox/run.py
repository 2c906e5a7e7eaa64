"""Runs untrusted Python programs in the sandbox of this process, and returns their output.

The first program starts a worker, which later ones find warm. docs/sandbox.md says what the sandbox
guarantees and what it does not.
"""

import atexit
import os
import threading
from dataclasses import dataclass
from functools import lru_cache

from mcore_rl.sandbox.execution import CodeRequest, execute
from mcore_rl.sandbox.languages import Language, readable_paths
from mcore_rl.sandbox.limits import Limits, RunVerdict, SandboxError
from mcore_rl.sandbox.pool import WorkerPool

__all__ = ["Limits", "Outcome", "SandboxError", "run_program"]
_PYTHON = {"python": Language("python", "program.py")}
_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `killed` names the limit that ended it, or is empty.

    `status` is its exit status, or 128 + signal. Output beyond the limit is cut off.
    """

    status: int
    stdout: str
    stderr: str
    killed: str = ""


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program in a sandbox.

    Raises SandboxError if this machine allows none: a program never runs outside of one.
    """
    request = CodeRequest(source, stdin=stdin, limits=limits or Limits())
    with _lock:
        pool = _pool_of(os.getpid())
    result = execute(pool, _PYTHON, request)
    ran = result.ran
    if result.verdict == RunVerdict.SANDBOX_ERROR or ran is None:
        raise SandboxError(result.message)
    out, err = (text.decode(errors="replace") for text in (ran.stdout, ran.stderr))
    return Outcome(ran.status, out, err, ran.killed)


@lru_cache
def _pool_of(pid: int) -> WorkerPool:
    """Return the pool of this process; a fork must not use that of its parent."""
    pool = WorkerPool(readable_paths({}), num_workers=os.cpu_count() or 1)
    atexit.register(_close, pool)
    return pool


def _close(pool: WorkerPool) -> None:
    if pool.owner_pid == os.getpid():
        pool.close()
