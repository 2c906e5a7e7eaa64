"""Tags all processes that a block starts, and ends them however the block ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.cluster import watchdog
from mcore_rl.process import relaunch
from mcore_rl.process.disk import report_full_disk, reserve_space
from mcore_rl.process.folders import find_compile_caches, find_short_root
from mcore_rl.process.process_state import wait_killed

TEMP_PREFIX = "mcore_rl_ray_"
OPEN = "r"
"""A subfolder that Ray opens to all users (0777); other users cannot pass its parent."""
_SESSION_BYTES = 32 << 20
"""The least space for Ray's logs and for the temporary files of ranks and engines."""
_BELOW = len(f"/{TEMP_PREFIX}xxxxxxxx/{OPEN}") + 64
"""Length of a socket's path below the folder for temporary files. Ray appends 64 bytes:
/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store (ray/_private/node.py)."""


@contextmanager
def tag_processes(session: str) -> Iterator[None]:
    """Tag the processes that the block starts and end them afterwards.

    If this process dies first, a watchdog ends them. Their temporary files go to the session's
    folder, which is removed; compile caches are kept. Variables of the environment say so, and are
    left as they are: `restore_variables` is for the caller.
    """
    relaunch.note_session(session)
    arguments = [session, str(os.getpid()), str(watchdog.STOPPED_S), relaunch.choose_hint()]
    command = [sys.executable, "-I", watchdog.__file__, *arguments]
    watchdog_process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    os.environ[watchdog.TAG] = os.environ["TMPDIR"] = session
    os.environ.update(find_compile_caches())
    try:
        yield
    finally:
        with ignore_interrupts():
            watchdog.end_session(session)
            watchdog_process.kill()
            wait_killed(watchdog_process, "the watchdog")


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while processes end in order: a second Ctrl-C would leave orphans."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def make_ray_temp_dir() -> Iterator[Path]:
    """Make a folder of mode 0700 for Ray's folder OPEN, with a path short enough for sockets.

    Raises ValueError if there is no place for sockets, DiskFullError if there is no space.
    """
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=find_short_root(_BELOW)))
    try:
        with report_full_disk(path), tempfile.TemporaryFile(dir=path) as file:
            reserve_space(file.fileno(), _SESSION_BYTES)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
