"""However a controller ends, nothing of its session is left; sessions side by side leave each other alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster.session import ray_session
from mcore_rl.config import ClusterConfig

pytestmark = pytest.mark.e2e

Controller = subprocess.Popen[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Controller]]:
    started: list[Controller] = []

    def run(then: str) -> Controller:
        command = [sys.executable, "-m", "tests.cluster.controller", str(tmp_path / str(len(started))), then]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, text=True, process_group=0, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_nothing_is_left_however_two_sessions_end(start) -> None:
    first, second = start("spin"), start("wait")
    of_first, of_second = processes_when_ready(first), processes_when_ready(second)
    go_on(first)

    second.kill()
    assert left_of(of_second) == []
    assert first.poll() is None and len(left_of(of_first, timeout_s=0)) == len(of_first)

    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    assert first.wait(timeout=15) == 130
    assert left_of(of_first, timeout_s=0) == []
    assert first.stderr.read() == ""


@pytest.mark.parametrize(
    ("then", "stop", "status", "last_line"),
    [
        ("sleep_long", signal.SIGTERM, 143, ""),
        ("fail", None, 1, "ValueError: the controller's own error"),
    ],
)
def test_nothing_is_left_after(start, then: str, stop: signal.Signals | None, status: int, last_line: str):
    process = start(then)
    begun = processes_when_ready(process)
    go_on(process)
    if stop is not None:
        time.sleep(0.5)
        process.send_signal(stop)
    assert process.wait(timeout=15) == status
    assert left_of(begun, timeout_s=0) == []
    assert process.stderr.read().strip().endswith(last_line)


def test_an_idle_session_uses_no_cpu(start) -> None:
    process = start("wait")
    begun = processes_when_ready(process)
    time.sleep(2)
    before = cpu_seconds(begun)
    time.sleep(10)
    assert cpu_seconds(begun) - before < 1.0


def test_a_killed_session_leaves_no_files_behind_the_next(start) -> None:
    process = start("wait")
    [temp_dir] = {
        argument.split("=")[1].split("/session_")[0]
        for p in processes_when_ready(process)
        for argument in p.cmdline()
        if argument.startswith("--session-dir=")
    }
    process.kill()
    process.wait()
    assert Path(temp_dir).name.startswith("mcore_rl_ray_") and Path(temp_dir).is_dir()
    with ray_session(ClusterConfig(object_store_mib=80)):
        assert not Path(temp_dir).exists()


def test_an_address_without_ray_is_refused() -> None:
    address = "127.0.0.1:1"
    with (
        pytest.raises(ValueError, match=f"cluster.address={address}"),
        ray_session(ClusterConfig(address=address)),
    ):
        pass


def processes_when_ready(controller: Controller) -> list[psutil.Process]:
    """The controller's processes, down to the children of its ranks, once they all run."""
    assert controller.stdout is not None and controller.stderr is not None
    words = controller.stdout.readline().split()
    assert words and words[0] == "ready", controller.stderr.read()
    processes = psutil.Process(controller.pid).children(recursive=True)
    ranks = [p for p in processes if p.pid in map(int, words[1:])]
    assert len(ranks) == 2 and all(rank.children() for rank in ranks)
    return processes


def go_on(controller: Controller) -> None:
    assert controller.stdin is not None
    controller.stdin.write("\n")
    controller.stdin.flush()


def left_of(processes: list[psutil.Process], timeout_s: float = 8.0) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)
