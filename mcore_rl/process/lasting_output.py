"""Keeps a process going when its output, such as its log, cannot be written any more.

    write fails -> said once on the other of stdout and stderr; what follows is counted, not kept
    write works again -> a line that tells how much is missing, then the output as before

This module imports the standard library only, as short programs do.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

from mcore_rl.process.disk import explain_loss


def keep_output_lasting() -> None:
    """Have sys.stdout and sys.stderr raise nothing, whatever becomes of the files behind them.

    A stream that does not write to its usual descriptor stays as it is.
    """
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _lasting(stream: Any, descriptor: int) -> Any:
    if not isinstance(stream, io.TextIOWrapper) or _descriptor_of(stream) != descriptor:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or descriptor == 2,
    )


def _descriptor_of(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class _LastingFile(io.FileIO):
    """Takes every byte; those that cannot be written are lost and counted."""

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
