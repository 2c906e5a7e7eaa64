"""Finding and ending the processes of a session, and saying who died first."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster import watchdog

SLEEP = [sys.executable, "-c", "import sys, time; print(flush=True); time.sleep(60)"]
OPEN_A_FILE = [
    sys.executable,
    "-c",
    "import sys, time; f = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)",
]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(
    command: list[str], processes: list[subprocess.Popen[str]], **environment: str
) -> subprocess.Popen[str]:
    """Start a process and wait until it runs."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    processes.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_processes_belong_to_a_session_by_mark_or_by_an_open_file(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    session = str(tmp_path / "session")
    Path(session).mkdir()
    tagged = start(SLEEP, processes, **{watchdog.TAG: session})
    opened = start([*OPEN_A_FILE, f"{session}/log"], processes)
    other = start(SLEEP, processes, **{watchdog.TAG: str(tmp_path / "another")})
    found = watchdog.list_session_pids(session, excluded_pid=os.getpid())
    assert sorted(found) == sorted([tagged.pid, opened.pid])
    assert watchdog.list_session_pids(session, excluded_pid=tagged.pid) == [opened.pid]
    watchdog.end_session(session)
    assert tagged.wait(5) == opened.wait(5) == -signal.SIGKILL
    assert other.poll() is None


def test_a_process_that_is_gone_is_ending(processes: list[subprocess.Popen[str]]) -> None:
    process = start(SLEEP, processes)
    assert not watchdog.is_ending(process.pid)
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert watchdog.is_ending(process.pid)
    process.wait()
    assert watchdog.is_ending(process.pid)


def test_ray_processes_are_found_by_name_and_parent(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    for name in ("raylet", "gcs_server", "other"):
        shutil.copy(sleep, tmp_path / name)
        processes.append(subprocess.Popen([str(tmp_path / name), "60"], text=True))
    pids = {"raylet": processes[0].pid, "gcs_server": processes[1].pid}
    deadline = time.monotonic() + 10
    while watchdog.find_ray_children(os.getpid()) != pids:
        assert time.monotonic() < deadline, watchdog.find_ray_children(os.getpid())
        time.sleep(0.01)
    assert watchdog.find_ray_children(1) == {}


def test_messages_name_who_died() -> None:
    assert watchdog.describe_lost_ray("raylet").startswith("Ray's raylet process died")
    both = watchdog.describe_joint_death(12, ["raylet", "gcs_server"])
    assert "process 12) and Ray's raylet process and Ray's gcs_server process died together" in both
    gone = watchdog.wait_for_parent(2**22 + 1)
    assert gone.startswith(f"the controller (process {2**22 + 1}) was killed")
