"""Rotates the log that the output of processes goes to; nothing that they write is lost.

    one process     log is full -> renamed to a segment, a new log opened, its output turned to it
    its children    the log is another file than theirs -> their output turned to it

Output that comes between the two steps goes to the segment, and so does that of children which do
not follow. This module imports the standard library only, as short programs do.
"""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.process.log_segments import rotate
from mcore_rl.process.variables import set_variables

ROTATE_BYTES = "MCORE_RL_ROTATE_LOG_BYTES"
"""The variable that tells the processes of a run at which size to rotate their logs."""
_PATH = "MCORE_RL_LOG_PATH"
"""The variable that tells the children of a process where its log is."""
_LOOK_EVERY_S = 2.0


@contextlib.contextmanager
def rotating_logs(rotate_bytes: int) -> Iterator[None]:
    """Have processes that start in the block rotate logs of `rotate_bytes`; 0: none does."""
    with set_variables({ROTATE_BYTES: str(rotate_bytes)}):
        yield


def rotate_output(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Begin to rotate the log that this process's output goes to, in a thread.

    Does nothing where the output is no file, or where ROTATE_BYTES does not ask for it.
    """
    os.environ.pop(_PATH, None)  # of another log, that of the process which started this one
    rotate_bytes = int(os.environ.get(ROTATE_BYTES) or 0)
    if rotate_bytes and stat.S_ISREG(os.fstat(1).st_mode):
        path = Path(os.readlink("/proc/self/fd/1"))
        os.environ[_PATH] = str(path)
        _start(path, rotate_bytes, look_every_s)


def follow_output(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Begin to turn this process's output to the log that its parent has rotated, in a thread.

    Does nothing in a process whose parent does not rotate.
    """
    if path := os.environ.get(_PATH):
        _start(Path(path), 0, look_every_s)


def _start(path: Path, rotate_bytes: int, look_every_s: float) -> None:
    def look() -> None:
        while True:
            time.sleep(look_every_s)
            with contextlib.suppress(OSError):  # a full disk; the old file goes on
                _look(path, rotate_bytes)

    threading.Thread(target=look, name="log rotation", daemon=True).start()


def _look(path: Path, rotate_bytes: int) -> None:
    """Rotate the log if it has `rotate_bytes`, unless they are 0; turn the output to the newest."""
    own = os.fstat(1)
    is_newest = path.exists() and os.path.samestat(own, path.stat())
    if is_newest and rotate_bytes and own.st_size >= rotate_bytes:
        rotate(path)
        is_newest = False
    elif not is_newest and not rotate_bytes and not path.exists():
        return  # the parent is about to make it
    if not is_newest:
        _turn_output(path)


def _turn_output(path: Path) -> None:
    newest = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for descriptor in (1, 2):
            os.dup2(newest, descriptor)
    finally:
        os.close(newest)
