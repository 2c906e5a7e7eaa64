"""A signal that arrives in a callback of a fork is answered after it, and no lock stays taken."""

import subprocess
import sys

import pytest

from mcore_rl.process import signals

FORKS = """
import logging, os, signal, sys, threading, time
where, kind, number = sys.argv[1], sys.argv[2], getattr(signal, sys.argv[3])
owner = os.getpid()
armed = False
lock = threading.Lock()

def strike():
    if armed and os.getpid() == owner:
        os.kill(owner, number)
        for _ in range(1000):  # Python answers between these
            pass

def before():
    lock.acquire()
    if where == "before":
        strike()

def after():
    if where == "after":
        strike()
    lock.release()

os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)

def stop(number, frame):
    sys.exit(128 + number)

if kind == "ours":
    from mcore_rl.process.signals import handle_outside_forks
    handle_outside_forks(number, stop)
    handle_outside_forks(signal.SIGUSR2, stop)  # registers the callbacks once more
else:
    signal.signal(number, stop)
armed = True
child = os.fork()
if child == 0:
    os._exit(0)
armed = False
os.waitpid(child, 0)
print("lock", lock.acquire(timeout=1), flush=True)
time.sleep(20)
"""


def run(where: str, kind: str, number: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", FORKS, where, kind, number]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_signal_during_a_fork_ends_the_process_after_it(
    where: str, number: str, status: int
) -> None:
    done = run(where, "ours", number)
    assert done.returncode == status
    assert "ignored" not in done.stderr and "lock False" not in done.stdout


def test_python_alone_drops_it_and_keeps_the_lock() -> None:
    command = [sys.executable, "-c", FORKS.replace("time.sleep(20)", ""), "after", "plain"]
    done = subprocess.run([*command, "SIGTERM"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout == "lock False\n"
    assert "Exception ignored" in done.stderr


LATER = f"""
import os, signal, time
from {signals.__name__} import handle_outside_forks

def stop(number, frame):
    raise KeyboardInterrupt

handle_outside_forks(signal.SIGINT, stop)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("at once")
"""


def test_a_signal_at_any_other_time_is_answered_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "at once\n"
