"""Marks the processes that a block starts, and ends all of them however it is left."""

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

TEMP_PREFIX = "mcore_rl_ray_"
LONGEST_TEMP_ROOT = 20
"""In characters: Ray appends 67 for its sockets, and a socket's path may have 107."""


@contextmanager
def marked_processes(session: str) -> Iterator[None]:
    """Mark the processes that the block starts and end them afterwards.

    If this process dies first, a watchdog ends them. Their temporary files go to the session's
    folder and are removed with it; compile caches are kept.
    """
    command = [sys.executable, "-I", watchdog.__file__, session, str(os.getpid())]
    watchdog_process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    before = dict(os.environ)
    os.environ[watchdog.MARK] = os.environ["TMPDIR"] = session
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor")
    try:
        yield
    finally:
        with uninterrupted():
            watchdog.end_session(session)
            watchdog_process.kill()
            watchdog_process.wait()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C during an orderly end of a few seconds: a second one would leave orphans."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def ray_temp_dir() -> Iterator[Path]:
    """Make a folder for Ray's logs and sockets, whose paths must be short."""
    root = Path(tempfile.gettempdir())
    root = root if len(str(root)) <= LONGEST_TEMP_ROOT else Path("/tmp")
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
