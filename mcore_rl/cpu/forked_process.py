"""Makes of a fork the process that it was asked to be."""

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_VARIABLES = slice(47, 49)
"""Where they begin and end: fields of /proc/<pid>/stat behind its name (proc_pid_stat(5))."""


@dataclass(frozen=True)
class ForkRequest:
    """The process that a fork is to become.

    command          its command line without the interpreter's own options
    tied             it ends with the process that asked, which learns its exit status
    blocked_signals  numbers
    oom_score_adj    how readily the kernel kills it where memory is short, as /proc writes it
    descriptors      of files that it was given: standard streams first
    """

    command: list[str]
    environment: dict[str, str]
    cwd: str
    tied: bool
    blocked_signals: list[int]
    oom_score_adj: str
    descriptors: list[int]


def become(request: ForkRequest) -> None:
    """Be as a new process would that was given the request's command.

    Its first three descriptors become its standard streams; the request keeps the others.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
    for number, stream in enumerate(request.descriptors[:3]):
        os.dup2(stream, number)
        os.close(stream)
    del request.descriptors[:3]
    with suppress(PermissionError):  # only root may lower it
        Path("/proc/self/oom_score_adj").write_text(request.oom_score_adj)
    _take_environment(request.environment)
    sys.argv = list(request.command)
    os.chdir(request.cwd)
    tempfile.tempdir = None  # TMPDIR is another one now
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself


def _take_environment(environment: Mapping[str, str]) -> None:
    """Replace os.environ, and the variables that `ps` and /proc show.

    The kernel shows a block of memory, as long as this process's variables were at its start: those
    that do not fit are not shown, and those that differ from the old ones come first. The command
    line that it shows stays; libraries for titles of processes write over it.
    """
    before = dict(os.environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[_VARIABLES])
    os.environ.clear()  # before its memory is written over
    shown = b""
    for name in sorted(environment, key=lambda name: environment[name] == before.get(name)):
        variable = os.fsencode(f"{name}={environment[name]}") + b"\0"
        if len(shown) + len(variable) <= end - start:
            shown += variable
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
    os.environ.update(environment)
