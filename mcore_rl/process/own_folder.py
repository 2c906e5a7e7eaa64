"""Keeps caches below /tmp, and other folders with well-known names, to one user."""

import os
import stat
import tempfile
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def make_own_folder(path: Path) -> Path:
    """Return `path`, created with mode 0700, or a new folder beside it if it is not this user's.

    A compiled library that another user wrote, or has linked there, would run with this user's
    rights.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a file or a dead link of its name
        pass
    else:
        if _is_own(path):
            return path
    return Path(tempfile.mkdtemp(prefix=f"{path.name}_"))


def compile_cache() -> dict[str, str]:
    """Return the variable that names the user's cache of compiled code, for all runs together.

    One that is set already is kept.
    """
    if INDUCTOR in os.environ:
        return {}
    folder = Path(tempfile.gettempdir()) / f"mcore_rl_inductor_{os.getuid()}"
    return {INDUCTOR: str(make_own_folder(folder))}


def _is_own(path: Path) -> bool:
    """Return whether only this user writes there, and no other user chose where it lies."""
    found = path.lstat()
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not writable_by_others
