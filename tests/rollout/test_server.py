"""Processes of a server die with the one that started it, however deep they were forked."""

import os
import subprocess
import sys
import time

import pytest

FAMILY = """
import os, sys, time
from mcore_rl.rollout.server import die_with_parent, forks_die_with_their_parents
die_with_parent(int(sys.argv[1]))
forks_die_with_their_parents()
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_killed_server_takes_its_grandchildren_along() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    pids = [int(server.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, pids))
    server.kill()
    server.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


@pytest.mark.timeout(60)
def test_a_child_whose_parent_is_gone_already_exits() -> None:
    not_the_parent = os.getppid()
    command = [sys.executable, "-c", FAMILY, str(not_the_parent)]
    assert subprocess.run(command, timeout=50, check=False).returncode == 1
