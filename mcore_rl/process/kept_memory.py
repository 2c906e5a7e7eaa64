"""Keeps memory of this machine that outlives the processes which write to it.

holder                                     a rank
memory without a name  <--- /proc/.../fd --- maps it, writes its state, dies
                       <------------------- the rank that takes its place maps it and reads

The memory ends once its holder has ended, however it ends, and nobody maps it any more. So nothing
is left in /dev/shm.
"""

import mmap
import os

HEADER_BYTES = 4096
"""The beginning of a piece, which says what is in it; zeros: nothing."""
NUM_COPIES = 2
"""Copies of a rank's state: one is whole while the other one is written."""


class KeptMemory:
    """Pieces of memory by name; other processes of the same user and machine open them by path."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def reserve(self, name: str, num_bytes: int) -> str:
        """Return the path of a new piece of zeros, in the place of an earlier one of the name.

        The system takes no memory for pages that nobody has written to.
        """
        self.release(name)
        descriptor = os.memfd_create(f"mcore_rl_{name}")
        os.ftruncate(descriptor, num_bytes)
        self._descriptors[name] = descriptor
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def release(self, name: str) -> None:
        """Give up a piece, if it was reserved."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Give up all pieces."""
        for name in tuple(self._descriptors):
            self.release(name)


def map_kept(path: str) -> mmap.mmap:
    """Map the whole of a piece, to read and to write.

    Raises ValueError with the path if its holder is gone, or belongs to another user or machine.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ValueError(
            f"{path}: the memory of a rank's state cannot be opened ({error.strerror}): its holder"
            " has ended, or runs as another user or in another container"
        ) from error
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
