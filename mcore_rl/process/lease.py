"""Holds a lease on a folder that several hosts see, where a file lock may count on one host only.

    holder on host A     writes its name and a count to a file, and again every BEAT_S
    a start on host B    reads the file for DEADLINE_S: it changes  -> B is refused, and A is named
                                                        it does not -> B writes its own name
    A, if it was only stopped, reads B's name before its next beat, and is told that it lost

Contents are compared, never clocks, as those of two hosts may differ.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mcore_rl.process.file_lock import LockedError, describe_holder

BEAT_S = 5.0
DEADLINE_S = 60.0
POLL_S = 0.2
_CONFIRM_S = 2.0
_SIZE = 512
"""Bytes of the file: a constant, so that a renewal never needs more of a full disk."""


@dataclass(frozen=True)
class _Entry:
    """The content of the file: the holder in words, its kernel and its own mark, and a count."""

    holder: str
    kernel: str
    mark: str
    beat: int = 0

    @staticmethod
    def make() -> "_Entry":
        return _Entry(describe_holder(), read_boot_id(), uuid.uuid4().hex)

    @staticmethod
    def parse(text: str) -> "_Entry":
        """Return the entry; that of an unknown process if the file is not written whole."""
        try:
            return _Entry(**json.loads(text))
        except (ValueError, TypeError):
            return _Entry("another process", "", "")

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_SIZE)


def read_boot_id() -> str:
    """Return what tells this kernel from those of other hosts: an id, or the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # some sandboxes have no such file
        return socket.gethostname()


@contextmanager
def hold_lease(
    path: Path,
    is_locked: bool,
    lose: Callable[[str], None],
    *,
    beat_s: float = BEAT_S,
    deadline_s: float = DEADLINE_S,
) -> Iterator[None]:
    """Hold the lease in the file `path` for the block; the file is deleted with its end.

    is_locked    a file lock keeps other processes of this kernel out: a lease of one of them that
                 is found is over, and nothing has to be waited for
    lose         called with a message, in a thread, once another process has taken the lease
    deadline_s   how long a lease that is found must stay unchanged until it is taken over

    Raises LockedError if another process renews the lease meanwhile.
    """
    lease = _Lease(path, deadline_s)
    lease.take(is_locked)
    is_over = threading.Event()
    beats = threading.Thread(
        target=lease.keep, args=(is_over, beat_s, lose), name="run lease", daemon=True
    )
    beats.start()
    try:
        yield
    finally:
        is_over.set()
        beats.join(beat_s)
        lease.release()


class _Lease:
    def __init__(self, path: Path, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._own = _Entry.make()

    def take(self, is_locked: bool) -> None:
        while not self._create():
            found = self._read()
            if is_locked and found.kernel == self._own.kernel:
                self._write()
                return
            if self._watch(found):
                self._write()
                time.sleep(_CONFIRM_S)  # another start may have waited as long, and written, too
                if not self._is_own():
                    raise LockedError(self._path, self._read().holder)
                return

    def _create(self) -> bool:
        """Make the file, with this process as the holder; return False if there is one.

        On a full disk no file is left, for which the next start would wait.
        """
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "wb") as file:
                file.write(self._own.encode())
        except OSError:
            self._path.unlink()
            raise
        return True

    def _watch(self, found: _Entry) -> bool:
        """Return True once the entry has stayed as it was, False once the file is gone."""
        print(
            f"{self._path} names {found.holder}: the start waits for {self._deadline_s:g} s to see"
            " whether that process still runs",
            file=sys.stderr,
        )
        until_s = time.monotonic() + self._deadline_s
        while time.monotonic() < until_s:
            time.sleep(POLL_S)
            try:
                now = self._read()
            except FileNotFoundError:
                return False
            if now != found:
                raise LockedError(self._path, now.holder)
        return True

    def keep(self, is_over: threading.Event, beat_s: float, lose: Callable[[str], None]) -> None:
        """Renew the lease until `is_over`, or until another process has it.

        A filesystem that fails for a while costs a beat.
        """
        while not is_over.wait(beat_s):
            with contextlib.suppress(OSError):
                if not self._is_own():
                    lose(f"{self._path} was taken over by {self._read().holder}")
                    return
                self._own = replace(self._own, beat=self._own.beat + 1)
                self._write()

    def release(self) -> None:
        """Delete the file, unless another process has the lease or the file is gone."""
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink()

    def _is_own(self) -> bool:
        return self._read().mark == self._own.mark

    def _read(self) -> _Entry:
        # Opened anew each time: then NFS asks the server whether the file has changed.
        return _Entry.parse(self._path.read_text(errors="replace"))

    def _write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY)
        with open(descriptor, "wb") as file:
            file.write(self._own.encode())
