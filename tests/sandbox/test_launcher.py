"""The launcher outlives neither its caller nor a moment in which the caller was gone already."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mcore_rl.sandbox.launcher import _die_with_launcher

from mcore_rl.sandbox.run import LAUNCHER, Limits, _job

CALLER = """
import sys
from mcore_rl.sandbox.run import Limits, run_program
source = "import time\\nprint('up', flush=True)\\ntime.sleep(60)  # " + sys.argv[1]
run_program(source, limits=Limits(wall_s=60))
"""


def launch(tmp_path: Path, caller_pid: int) -> subprocess.CompletedProcess[bytes]:
    root = tmp_path / "root"
    root.mkdir()
    stdin = tmp_path / "stdin"
    stdin.touch()
    report, report_fd = os.pipe()
    try:
        job = _job("print('ran')", root, stdin, Limits(), report_fd) | {"caller_pid": caller_pid}
        return subprocess.run(
            [sys.executable, "-I", "-S", str(LAUNCHER)],
            input=json.dumps(job).encode() + b"\n",
            capture_output=True,
            pass_fds=[report_fd],
            timeout=30,
        )
    finally:
        os.close(report)
        os.close(report_fd)


def test_a_launcher_whose_caller_is_gone_runs_nothing(tmp_path: Path) -> None:
    """It compares its parent with the caller: an orphan has another parent."""
    orphan = launch(tmp_path, caller_pid=1 if os.getpid() != 1 else 2)
    assert (orphan.returncode, orphan.stdout) == (1, b"")


def test_a_launcher_with_its_caller_runs_the_program(tmp_path: Path) -> None:
    child = launch(tmp_path, caller_pid=os.getpid())
    assert (child.returncode, child.stdout) == (0, b"ran\n")


@pytest.mark.parametrize(("is_gone", "status"), [(True, 1), (False, 7)])
def test_the_first_process_ends_if_the_launcher_is_gone(is_gone: bool, status: int) -> None:
    alive_fd, held_fd = os.pipe()
    if is_gone:
        os.close(held_fd)  # before the fork, or the child might look first
    child = os.fork()
    if child == 0:
        try:
            _die_with_launcher(alive_fd)
            os._exit(7)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    os.close(alive_fd)
    if not is_gone:
        os.close(held_fd)


def test_a_killed_caller_leaves_no_program_behind() -> None:
    mark = f"launcher-test-{os.getpid()}"
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, mark], env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
    try:
        descendants = _wait_for_program(caller.pid)
    finally:
        caller.kill()
        caller.wait()
    _, alive = psutil.wait_procs(descendants, timeout=20)
    assert not alive


def _wait_for_program(pid: int) -> list[psutil.Process]:
    """Return all processes below `pid` once the program itself is among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        processes = psutil.Process(pid).children(recursive=True)
        # The launcher's short-lived child may be gone before its command line is read.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("/box/program.py" in process.cmdline() for process in processes):
                return processes
        time.sleep(0.02)
    raise AssertionError("the program did not start")
