"""Rotates logs, and keeps processes running if their logs cannot be written. Standard library only.

    engine.log is full --> engine.000001.log, and a new engine.log

The oldest segment has the smallest number. A segment is renamed once and never written again, so
nothing is lost or copied. A name that ends with .previous is another log.

Output of processes:
    one process     log is full --> renamed to a segment, a new log opened for its output
    its children    the log is a new file --> their output goes there, too

Output that comes between the two steps goes to the segment, and so does the output of children that
do not follow.

A log that cannot be written:
    write fails --> one line on the other of stdout and stderr; further output is counted and lost
    write works again --> a line tells how many bytes are lost, then output continues
"""

import contextlib
import errno
import io
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.process.clock import now_s
from mcore_rl.process.disk import explain_loss
from mcore_rl.process.variables import set_variables

_NUMBERED = re.compile(r"\.(\d{6,})$")


def find_segments(path: Path) -> list[Path]:
    """Return the segments of a log, the oldest first, without the current file."""
    found = [
        each
        for each in path.parent.glob(f"{_escape(path.stem)}.*{_escape(path.suffix)}")
        if _is_segment(each, path)
    ]
    return sorted(found, key=read_number)


def read_number(segment: Path) -> int:
    match = _NUMBERED.search(segment.stem)
    assert match is not None, segment
    return int(match[1])


def name_segment(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def rotate(path: Path) -> Path:
    """Rename the log to its newest segment and return the segment; the caller opens a new log."""
    number = max((read_number(segment) for segment in find_segments(path)), default=0) + 1
    segment = name_segment(path, number)
    path.rename(segment)
    return segment


def _is_segment(candidate: Path, path: Path) -> bool:
    match = _NUMBERED.search(candidate.stem)
    return (
        match is not None
        and candidate.suffix == path.suffix
        and candidate.stem[: match.start()] == path.stem
    )


def _escape(name: str) -> str:
    """Escape the special characters of glob in a name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def read_tail(path: Path, num_lines: int, most_bytes: int = 1 << 16) -> list[str]:
    """Return the last lines of a log, including its newest segments if the log itself has too few.

    At most `most_bytes` of each file are read. A missing file has no lines.
    """
    lines: list[str] = []
    for part in (path, *reversed(find_segments(path))):
        if len(lines) >= num_lines:
            break
        if part.exists():
            with part.open("rb") as file:
                file.seek(max(0, part.stat().st_size - most_bytes))
                lines = file.read(most_bytes).decode(errors="replace").splitlines() + lines
    return lines[-num_lines:]


ROTATE_BYTES = "MCORE_RL_ROTATE_LOG_BYTES"
"""Variable with the size at which the processes of a run rotate their logs."""
_PATH = "MCORE_RL_LOG_PATH"
"""Variable with the path of a process's log, for its children."""
_LOOK_EVERY_S = 2.0


@contextlib.contextmanager
def rotate_logs(rotate_bytes: int) -> Iterator[None]:
    """Make processes that start in the block rotate their logs at `rotate_bytes`; 0: never."""
    with set_variables({ROTATE_BYTES: str(rotate_bytes)}):
        yield


def rotate_output(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Start a thread that rotates the log which receives this process's output.

    Does nothing if the output is no file, or if ROTATE_BYTES is not set.
    """
    os.environ.pop(_PATH, None)  # The log of the process that started this one.
    rotate_bytes = int(os.environ.get(ROTATE_BYTES) or 0)
    if rotate_bytes and stat.S_ISREG(os.fstat(1).st_mode):
        path = Path(os.readlink("/proc/self/fd/1"))
        os.environ[_PATH] = str(path)
        _start(path, rotate_bytes, look_every_s)


def follow_output(look_every_s: float = _LOOK_EVERY_S) -> None:
    """Start a thread that redirects this process's output when its parent has rotated the log.

    Does nothing if the parent does not rotate.
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
    """Rotate a log of `rotate_bytes` (0: never), and redirect the output to the newest file."""
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


def keep_output_lasting() -> None:
    """Make sys.stdout and sys.stderr never raise, even if their files cannot be written.

    A stream that does not write to its usual descriptor stays as it is.
    """
    sys.stdout = _make_lasting(sys.stdout, 1)
    sys.stderr = _make_lasting(sys.stderr, 2)


def _make_lasting(stream: Any, descriptor: int) -> Any:
    if not isinstance(stream, io.TextIOWrapper) or _find_descriptor(stream) != descriptor:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or descriptor == 2,
    )


def _find_descriptor(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class _LastingFile(io.FileIO):
    """Accepts every byte, and counts the bytes that cannot be written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._num_lost_bytes = 0
        self._was_told = False

    def write(self, data: Any, /) -> int:
        try:
            if self._num_lost_bytes:
                self._tell_loss()
            written = super().write(data)
            if written is None:  # a pipe that does not block, with a slow reader
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self._tell_once(error)
            written = len(data)
            self._num_lost_bytes += written
        return written

    def _tell_loss(self) -> None:
        super().write(f"[{self._num_lost_bytes} bytes of this output are lost]\n".encode())
        self._num_lost_bytes = 0

    def _tell_once(self, error: OSError) -> None:
        if self._was_told:
            return
        self._was_told = True
        other = 3 - self.fileno()
        path = os.path.realpath(f"/proc/self/fd/{self.fileno()}")
        with contextlib.suppress(OSError):  # the other one is often the same file
            os.write(other, f"its output is lost: {explain_loss(path, error)}\n".encode())


class LogThrottle:
    """Limits repeated messages, as in an outage: one at once, then one per `every_s` seconds."""

    def __init__(self, every_s: float = 30.0) -> None:
        self._every_s = every_s
        self._next_s = -float("inf")
        self._num_held = 0

    def is_due(self, num_events: int = 1) -> bool:
        """Return whether to write a message about `num_events` now; otherwise count them."""
        if now_s() < self._next_s:
            self._num_held += num_events
            return False
        self._next_s = now_s() + self._every_s
        return True

    def describe_held(self) -> str:
        """Return "" or ", and 12 more before it" for the counted events, and reset the count."""
        held = self._num_held
        self._num_held = 0
        return f", and {held} more before it" if held else ""
