"""Locks a file against other processes; the kernel drops the lock when the holder dies."""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
"""Errors of filesystems without flock (some NFS, Lustre, FUSE and object-store mounts)."""
POLL_S = 0.1
_held: "weakref.WeakSet[_LockFile]" = weakref.WeakSet()


class LockedError(ValueError):
    """Another process, `holder`, holds the lock."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder}")
        self.holder = holder


def describe_holder() -> str:
    """Return this process, its host and the time in words."""
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {began}"


@contextmanager
def hold_lock(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Create `path` and hold an exclusive lock on it until the block ends.

    Yields whether the filesystem has locks, at least between the processes of one host.

    Raises LockedError if another process, or another call in this process, still holds the lock
    after `wait_s`. Raises ValueError if `path` is a link, because the linked file would be
    overwritten. On a filesystem without flock, the block runs unlocked and a line on stderr says
    so.

    No child inherits the lock: exec closes the descriptor (O_CLOEXEC), and so does a fork. The file
    is never deleted: otherwise two processes could lock two files of the same name.
    """
    file = _LockFile(path)
    try:
        yield file.lock(wait_s)
    finally:
        file.close()


class _LockFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"{path} is a link, and a lock must be a file: remove it") from None
        _held.add(self)

    def lock(self, wait_s: float) -> bool:
        """Take the lock; return False if the filesystem has none."""
        until = time.monotonic() + wait_s
        while True:
            try:
                is_locked = self._try()
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LockedError(self._path, self._read_holder()) from None
                time.sleep(POLL_S)
            else:
                self._sign()
                return is_locked

    def _try(self) -> bool:
        """Take the lock; return False if there is none. Raises BlockingIOError if it is held."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            print(
                f"{self._path} cannot be locked ({error.strerror}): the filesystem has no flock."
                " Make sure that no other process uses this folder",
                file=sys.stderr,
            )
            return False
        return True

    def _sign(self) -> None:
        """Write who holds the lock, which serves messages alone."""
        holder = describe_holder()
        with contextlib.suppress(OSError):  # a full disk must not cost the lock
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder.encode(), 0)

    def close(self) -> None:
        """Close the descriptor, which drops the lock unless a copy of the descriptor is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_holder(self) -> str:
        text = os.pread(self._fd, 4096, 0).decode(errors="replace").strip()
        return text or "another process"


def _close_in_child() -> None:
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)
