"""A stopped process is told as such, one that runs or sleeps or is gone is not."""

import os
import signal
import subprocess
import time

from mcore_rl.process.process_state import describe_state, find_stopped


def test_a_process_is_stopped_and_goes_on() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert describe_state(process.pid) == ""
        process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + 10
        while not (told := describe_state(process.pid)) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert told == "is stopped (state T; SIGCONT lets it go on)"
        process.kill()
    assert describe_state(process.pid) == ""
    assert describe_state(os.getpid()) == ""


def test_stopped_processes_are_found_by_their_group() -> None:
    command = ["sh", "-c", "sleep 60 & kill -STOP $!; echo $!; wait"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        try:
            child = int(shell.stdout.readline())
            # The signal is sent; a process stops when a core next runs it.
            stops_until_s = time.monotonic() + 30
            while not find_stopped(shell.pid) and time.monotonic() < stops_until_s:
                time.sleep(0.01)
            assert find_stopped(shell.pid) == [child]
            assert find_stopped(os.getpgid(0)) == []
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert find_stopped(shell.pid) == []
