"""Finds a folder whose sockets have paths that the kernel takes.

TMPDIR  /scratch/.../a/long/path  + /mcore_rl_forks_xxxxxxxx/socket  > 107 bytes: /tmp instead
"""

import os
import sys
import tempfile
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
