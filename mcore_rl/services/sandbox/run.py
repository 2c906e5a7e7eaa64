"""Runs untrusted programs in the sandbox of this process, and returns their output.

The first program starts a worker, which later ones find warm. docs/sandbox.md says what the sandbox
guarantees and what it does not.
"""

import atexit
import os
import threading
from dataclasses import dataclass
from functools import lru_cache

from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import Limits, RunVerdict, SandboxError
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

__all__ = ["Limits", "Outcome", "SandboxError", "run_code", "run_program"]
_ENDLESS = 1 << 30
"""Threads of this process may all wait for a worker: nobody else sends requests."""
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
    result = run_code(CodeRequest(source, stdin=stdin, limits=limits or Limits()))
    ran = result.ran
    if result.verdict == RunVerdict.SANDBOX_ERROR or ran is None:
        raise SandboxError(result.message)
    out, err = (text.decode(errors="replace") for text in (ran.stdout, ran.stderr))
    return Outcome(ran.status, out, err, ran.killed)


def run_code(request: CodeRequest) -> CodeResult:
    """Run a request in any language of this machine.

    Raises ValueError for a language that is not there and for files that do not fit. Every failure
    of the sandbox is a result with verdict sandbox_error.
    """
    with _lock:
        sandbox = _sandbox_of(os.getpid())
    return sandbox.run_code(request)


@lru_cache
def _sandbox_of(pid: int) -> Sandbox:
    """Return the sandbox of this process; a fork must not use that of its parent."""
    sandbox = Sandbox(SandboxOptions(max_waiting=_ENDLESS))
    atexit.register(_close, sandbox, pid)
    return sandbox


def _close(sandbox: Sandbox, pid: int) -> None:
    if pid == os.getpid():
        sandbox.close()
