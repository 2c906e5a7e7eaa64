"""Tells a file that the system does not let this user read or write from other errors.

It takes an OSError, and gives one line with the file, the user, and the remedy.
"""

import errno
import getpass
import os
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_refused(error: OSError) -> bool:
    """Return whether `error` says that this user may not read, write or make a file."""
    return error.errno in _REFUSED


def explain_refusal(error: ValueError | OSError) -> str:
    """Return which file this user may not use, and the remedy; other errors say it themselves."""
    if not (isinstance(error, OSError) and is_refused(error)):
        return str(error)
    name = str(error) if error.filename is None else os.fsdecode(error.filename)
    if error.errno == errno.EROFS:
        return f"{name}: its filesystem is read-only; name another folder to write to"
    return (
        f"{name}: no permission for user {_user()}; have its owner give it (chmod), or name another"
    )


def check_readable(path: Path) -> None:
    """Raise the OSError that reading `path` gives, where a library would tell it as another."""
    with path.open("rb"):
        pass


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id that no file lists
        return str(os.getuid())
