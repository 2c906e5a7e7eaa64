"""Keeps memory of this machine that outlives the processes which write to it.

holder                                     a rank
memory without a name  <--- /proc/.../fd --- maps it, writes its state, dies
                       <------------------- the rank that takes its place maps it and reads

The memory ends once its holder has ended, however it ends, and nobody maps it any more. So nothing
is left in /dev/shm. Where a command starts its process again (process/relaunch.py), the command
holds the memory, too, and the next process finds it.
"""

import errno
import mmap
import os

from mcore_rl.process import relaunch

HEADER_BYTES = 4096
"""The beginning of a piece, which says what is in it; zeros: nothing."""
NUM_COPIES = 2
"""Copies of a rank's state: one is whole while the other one is written."""
_PIECE = "mcore_rl_"
"""How the system calls a piece, before its name."""
_PREFIX = "kept "
"""How the command that starts its process again calls a piece, before its name."""


class KeptMemory:
    """Pieces of memory by name; other processes of the same user and machine open them by path."""

    def __init__(self) -> None:
        """Take over the pieces of a lost process, whose place this one takes, if it does."""
        held = relaunch.find_held(_PREFIX)
        self._descriptors = {name.removeprefix(_PREFIX): piece for name, piece in held.items()}

    def find(self, name: str) -> str | None:
        """Return the path of a piece that is there; None if there is none."""
        descriptor = self._descriptors.get(name)
        return None if descriptor is None else _path_of(descriptor)

    def count_bytes(self) -> int:
        """Return the bytes of all pieces."""
        return sum(os.fstat(descriptor).st_size for descriptor in self._descriptors.values())

    def reserve(self, name: str, num_bytes: int) -> str:
        """Return the path of a piece: one of the size that is there, or else a new one of zeros.

        The system takes no memory for pages that nobody has written to.
        """
        found = self._descriptors.get(name)
        if found is not None and os.fstat(found).st_size == num_bytes:
            return _path_of(found)
        self.release(name)
        descriptor = os.memfd_create(f"{_PIECE}{name}")
        os.ftruncate(descriptor, num_bytes)
        self._descriptors[name] = descriptor
        relaunch.hold(f"{_PREFIX}{name}", descriptor)
        return _path_of(descriptor)

    def release(self, name: str) -> None:
        """Give up a piece, if it was reserved."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            relaunch.drop(f"{_PREFIX}{name}")
            os.close(descriptor)

    def close(self) -> None:
        """Give up all pieces."""
        for name in tuple(self._descriptors):
            self.release(name)


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def map_kept(path: str) -> mmap.mmap:
    """Map the whole of a piece, to read and to write.

    Raises ValueError with the path if its holder is gone or has given the piece up, or belongs to
    another user or machine.
    """
    try:
        descriptor = _open_piece(path)
    except OSError as error:
        raise ValueError(
            f"{path}: the memory of a rank's state cannot be opened ({error.strerror}): its holder"
            " has ended, or runs as another user or in another container"
        ) from error
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)


def _open_piece(path: str) -> int:
    """Return a descriptor of a piece. Raises OSError if there is none, or another file by now."""
    if not os.readlink(path).startswith(f"/memfd:{_PIECE}"):
        raise OSError(errno.ENOENT, "it was given up")
    return os.open(path, os.O_RDWR)
