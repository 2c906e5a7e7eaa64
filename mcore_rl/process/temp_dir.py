"""Makes a temporary folder per engine, and first removes those whose owners were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from mcore_rl.process.short_folder import find_short_root

_PREFIX = "mcore_rl_engine_"
_BELOW = len(f"/{_PREFIX}xxxxxxxx/tmpxxxxxxxx") + 8
"""Bytes of the path of SGLang's sockets below, and a few for others that it may add."""
_MIN_AGE_S = 60.0
"""A younger folder may be one that its owner has not locked yet."""


class TempDir:
    """A folder that this process keeps locked as long as it lives."""

    def __init__(self, parent: str = "") -> None:
        """`parent` empty: the system's folder for temporary files, or a shorter one for sockets."""
        parent = parent or str(find_short_root(_BELOW))
        sweep(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder if it is still there."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: str, min_age_s: float = _MIN_AGE_S) -> None:
    """Remove folders older than `min_age_s` in `parent` that nobody has locked."""
    for path in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if time.time() - path.stat().st_mtime > min_age_s and not _is_locked(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
