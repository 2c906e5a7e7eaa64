"""Gives a fork the command line and the environment of another process, also in `ps` and /proc."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ARGUMENTS, _VARIABLES = slice(45, 47), slice(47, 49)
"""Where these two begin and end: fields of /proc/<pid>/stat behind its name (proc_pid_stat(5))."""


def take_identity(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace sys.argv and os.environ, and what the kernel shows of both.

    The kernel shows a block of memory, as long as this process's own were at its start: the rest of
    a longer command line is not shown, nor are variables that do not fit. Those that differ from
    the old ones come first.
    """
    before = dict(os.environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    os.environ.clear()  # before its memory is written over
    start, end = map(int, fields[_ARGUMENTS])
    shown = b"\0".join(map(os.fsencode, [sys.executable, *command]))
    _fill(start, end, shown[: end - start - 1])
    start, end = map(int, fields[_VARIABLES])
    shown = b""
    for name in sorted(environment, key=lambda name: environment[name] == before.get(name)):
        variable = os.fsencode(f"{name}={environment[name]}") + b"\0"
        if len(shown) + len(variable) <= end - start:
            shown += variable
    _fill(start, end, shown)
    os.environ.update(environment)
    sys.argv = list(command)


def _fill(start: int, end: int, data: bytes) -> None:
    """Write into a block of memory from address `start` on, with zeros behind."""
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
