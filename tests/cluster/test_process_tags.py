"""Whatever a block starts is ended with it, and its folder is removed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray._common.utils import try_to_create_directory

from mcore_rl.cluster import process_tags
from mcore_rl.cluster.process_tags import (
    OPEN,
    TEMP_PREFIX,
    ignore_interrupts,
    make_ray_temp_dir,
    tag_processes,
)
from mcore_rl.cluster.watchdog import TAG
from mcore_rl.process.disk import DiskFullError
from mcore_rl.process.folders import LONGEST_PATH
from mcore_rl.process.variables import restore_variables
from tests.support.small_disks import mounted


def test_a_process_that_left_its_session_ends_with_the_block() -> None:
    with make_ray_temp_dir() as folder:
        assert folder.name.startswith(TEMP_PREFIX)
        with restore_variables(), tag_processes(str(folder)):
            assert tempfile.gettempdir() != str(folder)  # already chosen in this process
            assert os.environ["TMPDIR"] == os.environ[TAG] == str(folder)
            started = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            )
        assert started.wait(5) != 0
        assert TAG not in os.environ
    assert not folder.exists()


SHARING = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_a_process_that_does_not_end_leaves_no_shared_memory() -> None:
    with restore_variables(), make_ray_temp_dir() as folder, tag_processes(str(folder)):
        started = subprocess.Popen(
            [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        shared = Path("/dev/shm", started.stdout.readline().strip())
        assert shared.exists()
    assert started.wait(5) != 0
    assert not shared.exists()


def test_a_place_without_room_for_ray_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m") as small:
        monkeypatch.setattr(process_tags, "find_short_root", lambda below: small)
        refused = pytest.raises(DiskFullError, match=f"cannot write {small}/.* of 1 MiB free")
        with refused, make_ray_temp_dir():
            pass
        assert list(small.iterdir()) == []


def test_an_interrupt_waits_for_an_orderly_end() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    with ignore_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_users_do_not_reach_the_folder_that_ray_opens_to_all() -> None:
    with make_ray_temp_dir() as folder:
        try_to_create_directory(str(folder / OPEN))
        assert (folder / OPEN).stat().st_mode & 0o777 == 0o777, "as Ray does today"
        assert folder.stat().st_mode & 0o777 == 0o700


def test_the_longest_socket_of_ray_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = "session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
    for root in (tmp_path / ("x" * 133), Path("/tmp"), Path("/tmp/sixteen_letters")):
        root.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        with make_ray_temp_dir() as folder:
            assert len(str(folder / OPEN / session)) <= LONGEST_PATH
