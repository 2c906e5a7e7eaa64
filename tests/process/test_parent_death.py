"""A command that is started through parent_death runs as usual, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time

import psutil

from mcore_rl.process import parent_death

PARENT = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-m', 'mcore_rl.process.parent_death',"
    " str(os.getpid()), 'sleep', '600'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def test_the_command_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    until_s = time.monotonic() + 60
    while child.name() != "sleep" and time.monotonic() < until_s:
        time.sleep(0.02)
    assert child.name() == "sleep"
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    child.wait(60)
    assert not child.is_running()


def test_the_command_gets_its_arguments_and_gives_its_status() -> None:
    start = [sys.executable, "-m", "mcore_rl.process.parent_death", str(os.getpid())]
    done = subprocess.run([*start, "sh", "-c", "echo $0; exit 3", "word"], capture_output=True)
    assert (done.returncode, done.stdout) == (3, b"word\n")


def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    start = [sys.executable, "-m", "mcore_rl.process.parent_death", str(os.getpid() + 1_000_000)]
    done = subprocess.run([*start, "echo", "word"], capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_module_says_which_signal_it_asks_for() -> None:
    code = (
        "import ctypes, os, signal\n"
        f"from {parent_death.__name__} import die_with_parent\n"
        "die_with_parent(os.getppid(), signal.SIGTERM)\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found))\n"  # PR_GET_PDEATHSIG
        "print(found.value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) == signal.SIGTERM
