"""A lock ends with its holder, however that ends, and no child keeps it."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mcore_rl.process.file_lock import LockedError, hold_lock

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from mcore_rl.process.file_lock import hold_lock

with hold_lock(Path(sys.argv[1])):
    if sys.argv[2] == "fork":
        if os.fork() == 0:  # the child tells that it runs, and so that its copy is closed
            print(os.getpid(), flush=True)
    else:
        print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
    time.sleep(60)
"""


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with hold_lock(path):
        with pytest.raises(LockedError, match=f"process {os.getpid()} on "), hold_lock(path):
            pass
        with pytest.raises(LockedError), hold_lock(path):  # the refused one let go of nothing
            pass
    with hold_lock(path):
        pass


@pytest.mark.parametrize("kind", ["fork", "exec"])
def test_an_orphan_of_a_killed_holder_does_not_keep_the_lock(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), kind],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(LockedError, match=f"process {holder.pid} on "), hold_lock(path):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it is alive
        with hold_lock(path):
            pass
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def _exit() -> None:
    time.sleep(0)


def test_a_forked_child_that_ends_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with hold_lock(path):
        child = multiprocessing.get_context("fork").Process(target=_exit)
        child.start()
        child.join()
        with pytest.raises(LockedError), hold_lock(path):
            pass


def test_a_filesystem_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_lock(tmp_path / "run.lock"):
        pass
    assert "cannot be locked (Operation not supported)" in capsys.readouterr().err


def test_a_lock_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path):
        began = time.monotonic()
        with pytest.raises(LockedError), hold_lock(path, wait_s=0.3):
            pass
        assert time.monotonic() - began > 0.3
    first = hold_lock(path)
    first.__enter__()
    timer = threading.Timer(0.3, first.__exit__, (None, None, None))
    timer.start()
    with hold_lock(path, wait_s=30.0):
        assert time.monotonic() - began < 30
    timer.join()


def test_a_link_is_refused_and_its_file_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "run.lock").symlink_to(precious)
    with (
        pytest.raises(ValueError, match=r"run\.lock is a link, and a lock must be a file: remove"),
        hold_lock(tmp_path / "run.lock"),
    ):
        pass
    assert precious.read_text() == "data"


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077])
def test_umask_decides_who_may_take_the_lock(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with hold_lock(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666 & ~umask
