"""Gives libraries a home that they can write to, as where a container runs under any user id.

Ray, HuggingFace's libraries and compilers keep files in $HOME, and some ask for the user's name.
"""

import os
import pwd
import sys
import tempfile
from pathlib import Path

from mcore_rl.process.own_folder import make_own_folder

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
