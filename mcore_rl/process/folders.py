"""Makes the folders that processes need: short for sockets, private in /tmp, writable as HOME.

TMPDIR  /scratch/.../a/long/path  + /mcore_rl_forks_xxxxxxxx/socket  > 107 bytes: /tmp instead
engine  a temporary folder each; folders whose owners were killed are removed first
caches  of compiled code below /tmp or HOME: only where no other user can write
HOME    may be read-only where a container runs under any user id, but Ray, HuggingFace's
        libraries and compilers keep files there, and some ask for the user's name
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
"""Most bytes of a socket's path (sun_path of unix(7), without the final zero)."""
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_MULTIPROCESSING = len("/pymp-xxxxxxxx/listener-xxxxxxxx")


def find_short_root(num_bytes: int) -> Path:
    """Return the folder for temporary files, or a folder such as /tmp if that path is too long.

    `num_bytes` is the length of a socket's path below the folder. Raises ValueError if no folder is
    short enough.
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
    """Shorten TMPDIR for this process and its children if multiprocessing's sockets need it.

    Prints the change to stderr. Raises ValueError as find_short_root does.
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
"""Length of the path of SGLang's sockets below the root, and a few bytes to spare."""
_MIN_AGE_S = 60.0
"""The owner of a younger folder may not have locked the folder yet."""


class TempDir:
    """A temporary folder that this process keeps locked until the process ends."""

    def __init__(self, parent: str = "") -> None:
        """`parent`: by default the system's folder for temporary files, or a shorter one."""
        parent = parent or str(find_short_root(_BELOW))
        sweep(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder if it still exists."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: str, min_age_s: float = _MIN_AGE_S) -> None:
    """Remove unlocked folders in `parent` that are older than `min_age_s`."""
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
"""Variable -> path of the cache in HOME if the variable is not set."""


def make_own_folder(path: Path) -> Path:
    """Create `path` with mode 0700 and return it, or a new folder if other users can write there.

    A compiled library that another user wrote or linked there would run with this user's rights.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a file or a dead link of its name
        pass
    else:
        if _is_own(path):
            return path
    return Path(tempfile.mkdtemp(prefix=f"mcore_rl_{path.name.removeprefix('mcore_rl_')}_"))


def find_compile_caches() -> dict[str, str]:
    """Return the variables that name this user's caches of compiled code, which all runs share.

    Caches in HOME get no variable and stay where compilers put them, unless other users can write
    there. Variables that are already set are left out.
    """
    folder = Path(tempfile.gettempdir()) / f"mcore_rl_inductor_{os.getuid()}"
    caches = {} if INDUCTOR in os.environ else {INDUCTOR: str(make_own_folder(folder))}
    for variable, below_home in _DEFAULTS.items():
        default = Path.home() / below_home
        if variable not in os.environ and (kept := make_own_folder(default)) != default:
            caches[variable] = str(kept)
    return caches


def _is_own(path: Path) -> bool:
    """Return whether only this user can write to the folder or replace it.

    A parent folder that other users can write to must be sticky, as /tmp is.
    """
    found = path.lstat()
    writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not writable_by_others
    above = [folder.stat().st_mode for folder in path.absolute().parents]
    can_be_moved = any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)
    return is_own and not can_be_moved and os.access(path, os.W_OK | os.X_OK)


_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables that getpass.getuser reads before it asks for the user id."""


def keep_home_usable() -> None:
    """Set HOME to a folder below TMPDIR, for this process and its children, if HOME is read-only.

    Prints the change to stderr. Models that HuggingFace's libraries cached in HOME are still found.
    """
    uid = os.getuid()
    known = _find_user(uid)
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


def _find_user(uid: int) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return None


def _can_be_written(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
