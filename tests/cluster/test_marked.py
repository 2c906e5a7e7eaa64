"""Whatever a block starts is ended with it, and its folder is removed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mcore_rl.cluster.marked import TEMP_PREFIX, marked_processes, ray_temp_dir, uninterrupted
from mcore_rl.cluster.watchdog import MARK


def test_a_process_that_left_its_session_ends_with_the_block() -> None:
    with ray_temp_dir() as folder:
        assert folder.name.startswith(TEMP_PREFIX)
        with marked_processes(str(folder)):
            assert tempfile.gettempdir() != str(folder)  # already chosen in this process
            assert os.environ["TMPDIR"] == os.environ[MARK] == str(folder)
            started = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            )
        assert started.wait(5) != 0
        assert MARK not in os.environ
    assert not folder.exists()


SHARING = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_a_process_that_does_not_end_leaves_no_shared_memory() -> None:
    with ray_temp_dir() as folder, marked_processes(str(folder)):
        started = subprocess.Popen(
            [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        shared = Path("/dev/shm", started.stdout.readline().strip())
        assert shared.exists()
    assert started.wait(5) != 0
    assert not shared.exists()


def test_an_interrupt_waits_for_an_orderly_end() -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
