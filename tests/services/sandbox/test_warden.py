"""A warden outlives neither its caller nor a moment in which the caller was gone already."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.services.sandbox import warden
from mcore_rl.services.sandbox.messages import make_pair
from tests.support.sandboxes import descendants, make_worker, run, wait_until

CALLER = """
import sys
from mcore_rl.services.sandbox.service import Limits, run_program
print("begins", flush=True)
run_program("import time\\nprint('up', flush=True)\\ntime.sleep(300)", limits=Limits(wall_s=300))
"""
MARK = "mcore_rl.services.sandbox.warden"


def start_caller() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begins\n"
    return process


def wardens() -> set[int]:
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(MARK in word for word in process.info["cmdline"] or []):
            found.add(process.info["pid"])
    return found


def test_a_killed_caller_leaves_no_program_behind() -> None:
    caller = start_caller()
    try:
        # The warden, the first process of the box and the program.
        wait_until(lambda: len(descendants(caller.pid)) >= 3, "the program started")
        left = descendants(caller.pid)
    finally:
        caller.kill()
        caller.wait()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 5, 10, 15, 20, 40, 80, 160])
def test_a_caller_killed_at_any_moment_leaves_nothing(delay_ms: int) -> None:
    before = wardens()
    caller = start_caller()
    time.sleep(delay_ms / 1000)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    wait_until(lambda: not wardens() - before, f"the warden ended, {delay_ms} ms", 30)


def test_a_warden_that_starts_when_its_caller_is_gone_ends() -> None:
    here, there = make_pair()
    caller = subprocess.Popen(["true"])
    caller_fd = os.pidfd_open(caller.pid)
    caller.wait()
    here.close()
    child = os.fork()
    if child == 0:
        try:
            warden.main(there.fileno(), caller_fd, frozenset())
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    os.close(caller_fd)
    there.close()


def test_a_thread_that_started_a_worker_may_end() -> None:
    """A signal at the death of a parent is sent when the thread that started the child ends."""
    import threading

    workers = []
    thread = threading.Thread(target=lambda: workers.append(make_worker()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    try:
        assert run(workers[0], "print(1)").stdout == b"1\n"
    finally:
        workers[0].close()
