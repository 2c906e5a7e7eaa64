"""A keeper ends everything below it: when its pool is gone, when its worker ends, on a signal."""

import os
import signal
import subprocess
import sys

import pytest

from mcore_rl.agents.environments import keeper
from mcore_rl.agents.environments.keeper import count_resident_bytes, list_descendants
from tests.agents.environments.episodes import all_gone

WORKER = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
if os.fork() == 0:  # an orphan, as a daemon makes itself
    os.setsid()
    subprocess.Popen(["sleep", "301"])
    os._exit(0)
os.write(int(sys.argv[1]), b"up")
time.sleep(float(sys.argv[2]))
"""


def start(worker_s: float):
    """Return (the keeper, the end of its pipe that keeps it alive, a file with its output)."""
    alive_fd, held_fd = os.pipe()
    up_fd, socket_fd = os.pipe()
    command = [sys.executable, "-m", keeper.__name__, "--pool-pid", str(os.getpid())]
    command += ["--alive-fd", str(alive_fd), "--socket-fd", str(socket_fd)]
    command += [sys.executable, "-c", WORKER, str(socket_fd), str(worker_s)]
    process = subprocess.Popen(command, pass_fds=(alive_fd, socket_fd))
    os.close(alive_fd)
    os.close(socket_fd)
    assert os.read(up_fd, 2) == b"up"
    os.close(up_fd)
    return process, held_fd


@pytest.mark.parametrize("cause", ["pool", "worker", "signal", "worker killed"])
def test_nothing_is_left(cause):
    process, held_fd = start(worker_s=0.5 if cause == "worker" else 300)
    pids = list_descendants(process.pid)
    assert len(pids) >= 3
    if cause == "pool":
        os.close(held_fd)
    elif cause == "signal":
        process.terminate()
    elif cause == "worker killed":
        os.kill(pids[0], signal.SIGKILL)
    status = {"pool": 0, "worker": 0, "signal": 143, "worker killed": 137}[cause]
    assert process.wait(timeout=20) == status
    assert not all_gone(pids, within_s=1.0)
    if cause != "pool":
        os.close(held_fd)


def memory_of_one_with(num_bytes: int) -> int:
    """Measure a new process, as this one may free memory meanwhile."""
    fill = f"held = bytearray({num_bytes}); held[::4096] = b'x' * len(held[::4096])"
    code = f"import sys; {fill}; print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        resident = count_resident_bytes([process.pid])
        process.stdin.close()
    return resident


def test_the_memory_of_a_process_is_about_what_it_holds():
    empty, full = (memory_of_one_with(size) for size in (0, 64 * 2**20))
    assert 60 * 2**20 < full - empty < 80 * 2**20
    assert count_resident_bytes([2**22 + 1]) == 0
