"""Sees to it that only this user can read the token of a Ray that this process starts.

Ray itself writes it to ~/.ray/auth_token with the mode that umask leaves, as a rule 0644: whoever
reads it has Ray run what they like as this user. Where there is no home to write to, as under an
arbitrary user id in a container, the token goes to the run's own folder.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from mcore_rl.process.variables import set_variables

_log = logging.getLogger(__name__)
_BY_USER = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PATH = "RAY_AUTH_TOKEN_PATH"


@contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Make ~/.ray/auth_token, or a file in `folder`, with mode 0600, unless the user names a token.

    One that others can read is closed to them, and a warning says so.
    """
    if any(os.environ.get(name) for name in _BY_USER) or _keep_at_home():
        yield
        return
    path = folder / "token"
    _write(path)
    with set_variables({_PATH: str(path)}):
        yield


def _keep_at_home() -> bool:
    """Return whether Ray finds a token in the home that only this user can read."""
    home = os.environ.get("HOME")  # the only place where Ray looks it up
    if not home:
        return False
    path = Path(home, ".ray", "auth_token")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path)
        found = path.stat()
        if found.st_mode & 0o077:
            path.chmod(0o600)
            _log.warning(
                "%s had mode %o, so that other users could read it, and has 600 now; if others use"
                " this machine, remove it while no Ray runs, and the next run makes another",
                path,
                found.st_mode & 0o777,
            )
        return found.st_uid == os.geteuid() and os.access(path, os.R_OK)
    except OSError:
        return False


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(_token())


@cache
def _token() -> str:
    """Return a token of 256 bits, one per process: Ray reads it once and keeps it."""
    return secrets.token_hex(32)
