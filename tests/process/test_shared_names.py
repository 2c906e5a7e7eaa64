"""Named shared memory and semaphores go with processes that SIGKILL ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcore_rl.process import process_state

CODE = f"""
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory

if __name__ == "__main__":
    from {process_state.__name__} import start_resource_tracker

    if sys.argv[1] == "started":
        start_resource_tracker()
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore(0)
    context.Process(target=time.sleep, args=(60,)).start()
    kept = SharedMemory(create=True, size=4096)
    print(kept.name, "sem." + semaphore._semlock.name[1:], flush=True)
    time.sleep(60)
"""
SHARED = Path("/dev/shm")


def names_left(how: str, folder: Path) -> list[Path]:
    """Kill a group of two processes, and return its names, or those that stay for 3 s."""
    script = folder / "named.py"
    script.write_text(CODE)
    command = [sys.executable, str(script), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    names = [SHARED / name for name in process.stdout.readline().split()]
    assert len(names) == 2 and all(name.exists() for name in names)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    until_s = time.monotonic() + 3
    while any(name.exists() for name in names) and time.monotonic() < until_s:
        time.sleep(0.02)
    return [name for name in names if name.exists()]


def test_names_go_with_a_group_that_is_killed(tmp_path: Path) -> None:
    assert not names_left("started", tmp_path)


def test_pythons_own_tracker_dies_with_the_group(tmp_path: Path) -> None:
    """If this fails, Python has mended it, and the tracker of ours can go."""
    left = names_left("not started", tmp_path)
    assert len(left) == 2
    for name in left:
        name.unlink()
