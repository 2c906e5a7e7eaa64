"""Workers that end, hang, or leave processes behind cost their own samples alone."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.rewards.function_calls import RewardWorkers
from mcore_rl.rewards.user_function import run_in_worker

FUNCTIONS = """
import os, signal, subprocess, sys, time
def reward(*, data_source, solution_str, ground_truth, extra_info):
    if solution_str == "exit": os._exit(3)
    if solution_str == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "crash": import ctypes; ctypes.string_at(0)
    if solution_str == "orphan":
        if os.fork() == 0: time.sleep(600)
        os._exit(4)
    if solution_str == "hang":
        open(extra_info["pid"], "w").write(str(os.fork() or os.getpid()))
        time.sleep(600)
    return 1.0
"""
GOOD = {"score": 1.0}


@pytest.fixture
def pool() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(2)
    yield pool
    pool.close()


def call(pool: RewardWorkers, folder: Path, texts: list[str], timeout_s: float = 30.0) -> list:
    path = folder / "mine.py"
    path.write_text(FUNCTIONS)
    rows = [("unit", text, "7", {"pid": str(folder / "pid")}) for text in texts]
    return pool.call(run_in_worker, [(str(path), "reward", {}, row) for row in rows], timeout_s)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("exit", "ended with status 3"),
        ("kill", "was killed by SIGKILL"),
        ("crash", "was killed by SIGSEGV"),
        ("orphan", "ended with status 4"),
    ],
)
def test_a_worker_that_ends_costs_its_sample_at_once(
    pool: RewardWorkers, tmp_path: Path, text: str, how: str
) -> None:
    assert call(pool, tmp_path, ["a", "b"]) == [GOOD, GOOD]
    for _ in range(2):
        began_s = time.monotonic()
        got = call(pool, tmp_path, ["a", text, "b", text, text, "c"], timeout_s=300.0)
        assert time.monotonic() - began_s < 100.0  # not reward.timeout_s
        assert [got[i] for i in (0, 2, 5)] == [GOOD] * 3
        for i in (1, 3, 4):
            assert re.match(rf"RuntimeError: its process {how}: ", got[i])


def test_an_idle_worker_that_is_killed_is_replaced(pool: RewardWorkers, tmp_path: Path) -> None:
    call(pool, tmp_path, ["a"])
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    first = call(pool, tmp_path, ["a"])
    assert first == [GOOD] or "was killed by SIGKILL" in str(first[0])
    assert call(pool, tmp_path, ["a", "b"]) == [GOOD, GOOD]


def test_processes_of_a_late_function_end_with_its_worker(
    pool: RewardWorkers, tmp_path: Path
) -> None:
    [late] = call(pool, tmp_path, ["hang"], timeout_s=2.0)
    assert late == "TimeoutError: no answer within reward.timeout_s=2"
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert call(pool, tmp_path, ["a"]) == [GOOD]


def test_workers_and_their_processes_end_with_the_controller(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    script = tmp_path / "controller.py"
    script.write_text(
        "import sys\n"
        "from mcore_rl.rewards.user_function import run_in_worker\n"
        "from mcore_rl.rewards.function_calls import RewardWorkers\n"
        "if __name__ == '__main__':\n"
        "    row = ('unit', 'hang', '7', {'pid': sys.argv[2]})\n"
        "    RewardWorkers(1).call(run_in_worker, [(sys.argv[1], 'reward', {}, row)], 600.0)\n"
    )
    pid_file = tmp_path / "pid"
    controller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "mine.py"), str(pid_file)],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    deadline_s = time.monotonic() + 60.0
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    controller.kill()
    controller.wait()
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    """Wait up to 60 s for a process to end."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        status = Path(f"/proc/{pid}/status")
        try:
            if "State:\tZ" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
