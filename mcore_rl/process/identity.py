"""Gives a fork the command line and the environment of another process."""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_VARIABLES = slice(47, 49)
"""Where they begin and end: fields of /proc/<pid>/stat behind its name (proc_pid_stat(5))."""


def take_identity(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace sys.argv and os.environ, and the variables that `ps` and /proc show.

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
    sys.argv = list(command)
