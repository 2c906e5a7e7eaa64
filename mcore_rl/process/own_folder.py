"""Keeps caches below /tmp, and other folders with well-known names, to one user."""

import os
import stat
import tempfile
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_DEFAULTS = {
    "SGLANG_CACHE_DIR": ".cache/sglang",
    "TORCH_EXTENSIONS_DIR": ".cache/torch_extensions",
    "TRITON_CACHE_DIR": ".triton/cache",
    "TVM_FFI_CACHE_DIR": ".cache/tvm-ffi",
}
"""Variable -> where the cache lies in the home without it."""


def make_own_folder(path: Path) -> Path:
    """Return `path`, created with mode 0700, or a new folder elsewhere if others write to it.

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
    return Path(tempfile.mkdtemp(prefix=f"mcore_rl_{path.name.removeprefix('mcore_rl_')}_"))


def compile_caches() -> dict[str, str]:
    """Return variables that name the user's caches of compiled code, for all runs together.

    Those in the home stay where compilers put them, and have no variable here, unless others could
    write there. Variables that are set already are kept.
    """
    folder = Path(tempfile.gettempdir()) / f"mcore_rl_inductor_{os.getuid()}"
    caches = {} if INDUCTOR in os.environ else {INDUCTOR: str(make_own_folder(folder))}
    for variable, below_home in _DEFAULTS.items():
        default = Path.home() / below_home
        if variable not in os.environ and (kept := make_own_folder(default)) != default:
            caches[variable] = str(kept)
    return caches


def _is_own(path: Path) -> bool:
    """Return whether this user can write there, and no other can, or may put another in its place.

    A folder above that others write to must be sticky, as /tmp is.
    """
    found = path.lstat()
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not writable_by_others
    above = [folder.stat().st_mode for folder in path.absolute().parents]
    can_be_moved = any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)
    return is_own and not can_be_moved and os.access(path, os.W_OK | os.X_OK)
