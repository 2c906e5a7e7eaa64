"""Keeps caches below /tmp, and other folders with well-known names, to one user.

Finds a folder whose sockets have paths that the kernel takes.

TMPDIR  /scratch/.../a/long/path  + /mcore_rl_forks_xxxxxxxx/socket  > 107 bytes: /tmp instead

Makes a temporary folder per engine, and first removes those whose owners were killed.

Gives libraries a home that they can write to, as where a container runs under any user id.

Ray, HuggingFace's libraries and compilers keep files in $HOME, and some ask for the user's name.
"""

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

LONGEST_PATH = 107
"""Bytes of a socket's path in a file system (sun_path of unix(7), less its end)."""
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_MULTIPROCESSING = len("/pymp-xxxxxxxx/listener-xxxxxxxx")


def find_short_root(num_bytes: int) -> Path:
    """Return the folder for temporary files, or /tmp and the like if its path is too long.

    `num_bytes` of a socket's path follow below. Raises ValueError if no folder will do.
    """
    chosen = tempfile.gettempdir()
    for folder in (chosen, *_OTHERS):
        is_short = len(os.fsencode(folder)) + num_bytes <= LONGEST_PATH
        if is_short and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    raise ValueError(
        f"TMPDIR={chosen}: a socket there would have a path of"
        f" {len(os.fsencode(chosen)) + num_bytes} bytes, {LONGEST_PATH} are possible, and none of"
        f" {', '.join(_OTHERS)} can be written to: set TMPDIR to a folder of at most"
        f" {LONGEST_PATH - num_bytes} bytes"
    )


def keep_sockets_short() -> None:
    """Have this process and its children use a shorter TMPDIR if multiprocessing needs it.

    Says so on stderr. Raises ValueError as find_short_root.
    """
    before = tempfile.gettempdir()
    root = str(find_short_root(_MULTIPROCESSING))
    if root != before:
        print(
            f"mcore-rl: TMPDIR={before} is too long for sockets: temporary files go to {root}",
            file=sys.stderr,
        )
        os.environ["TMPDIR"] = tempfile.tempdir = root


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


_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where getpass.getuser looks before it asks for the user id."""


def keep_home_usable() -> None:
    """Have this process and its children use a folder below TMPDIR if HOME cannot be written to.

    Says so on stderr. Models that HuggingFace's libraries have cached in HOME are still found.
    """
    uid = os.getuid()
    known = _known_user(uid)
    if known is None and not any(os.environ.get(name) for name in _NAMES):
        os.environ["USER"] = f"uid{uid}"
    given = os.environ.get("HOME", "")
    if not given and known is not None and _can_be_written(known.pw_dir):
        os.environ["HOME"] = known.pw_dir
    elif not _can_be_written(given):
        home = make_own_folder(Path(tempfile.gettempdir()) / f"mcore_rl_home_{uid}")
        print(
            f"mcore-rl: HOME={given or '(not set)'} cannot be written to: caches go to {home}; set"
            " HOME to a folder that stays to keep them",
            file=sys.stderr,
        )
        models = Path(given, ".cache", "huggingface")
        if given and models.is_dir():
            os.environ.setdefault("HF_HOME", str(models))
        os.environ["HOME"] = str(home)


def _known_user(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _can_be_written(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
