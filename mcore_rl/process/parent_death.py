"""Ends a process together with its parent.

Run as `python -P -m mcore_rl.process.parent_death <pid of the parent> <command> ...`, this module
becomes the command, which the kernel kills once the parent is gone. It imports the standard library
only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread of `parent_pid` that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent_pid:
        os._exit(1)  # The parent died before the line above.


def main(arguments: list[str]) -> None:
    die_with_parent(int(arguments[0]))
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
