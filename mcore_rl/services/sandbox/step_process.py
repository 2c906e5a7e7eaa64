"""Turns a fork of a box's first process into a program: limits, no rights, filtered calls."""

import atexit
import builtins
import gc
import os
import resource
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from mcore_rl.services.sandbox import linux, seccomp
from mcore_rl.services.sandbox.isolation import BOX, INNER_ID

_MOST_DESCRIPTORS = 1 << 20
_SPARE_CPU_S = 1
"""Seconds from SIGXCPU, whose status says why a program ended, to SIGKILL for one that stays."""


def enter_cgroups(joins: Sequence[int]) -> None:
    """Move this process into the cgroups whose lists of tasks are open as `joins`."""
    for join in joins:
        os.pwrite(join, b"0", 0)


def place(fds: Sequence[int]) -> None:
    """Make fds[0] the descriptor 0, and so on, and close all others."""
    high = list(fds)
    while any(fd < len(fds) for fd in high):
        high = [os.dup(fd) if fd < len(fds) else fd for fd in high]
    for target, fd in enumerate(high):
        os.dup2(fd, target)
    os.closerange(len(fds), _MOST_DESCRIPTORS)


def become_program(step: dict[str, Any], call_filter: bytes) -> None:
    """Take up the limits of `step` for good, and execute its command, if it has one.

    Raises OSError if the machine refuses, and ValueError if its own limit is lower.
    """
    os.setsid()
    _reset_signals(bool(step["command"]))
    linux.drop_bounding_rights()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INNER_ID, INNER_ID, INNER_ID)
        os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    _set_limits(step["limits"])
    linux.drop_rights()
    seccomp.install(call_filter)
    os.umask(0o022)
    if step["command"]:
        os.execve(step["command"][0], step["command"], {**os.environ, **step["environment"]})


def _reset_signals(is_command: bool) -> None:
    """Set the signals that the sandbox changed as a new process finds them."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # A Python program finds SIGPIPE ignored, as the interpreter does that at its start.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL if is_command else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and value > hard:
            raise ValueError(
                f"{name}={value} is above the hard limit {hard} of this machine: raise it"
                " (ulimit -H, limits.conf, the container), or ask for less"
            )
        most = value if name != "RLIMIT_CPU" else value + _SPARE_CPU_S
        resource.setrlimit(number, (value, most if hard < 0 else min(most, hard)))


def run_python(path: str, kept: frozenset[str]) -> NoReturn:
    """Run a program in this interpreter, as `python <path>` would, and end with its status.

    Of the modules that are loaded it finds those named in `kept`; others are imported anew.
    """
    for name in set(sys.modules) - kept:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    status = 0
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as stop:
        status = _status_of(stop)
    except BaseException as error:  # the program's, which the caller reads in its output
        _report(error)
        status = 1
    os._exit(_finish(main, kept, status))


def _status_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Print the traceback as the interpreter does, without the frames of the sandbox."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _finish(main: types.ModuleType, kept: frozenset[str], status: int) -> int:
    """Do what the interpreter does at its end, but for tearing itself down.

    That would copy every page that it shares with its siblings. Returns the exit status.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for name in set(sys.modules) - kept:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(f"{BOX}/"):
            sys.modules[name].__dict__.clear()
    gc.collect()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter's own status for output that is lost
        return 120
    return status
