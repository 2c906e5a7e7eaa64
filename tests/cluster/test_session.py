"""However a controller ends, nothing of its session is left; other sessions are left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster.environment import RAY_DEFAULTS
from mcore_rl.cluster.session import _raise_if_ray_is_lost, open_ray_session
from mcore_rl.cluster.worker_setup import FORKS
from mcore_rl.config import ClusterConfig
from mcore_rl.process.network import find_free_port

pytestmark = pytest.mark.e2e

Controller = subprocess.Popen[str]
END_S = 60.0
"""Longest time that the end of a controller takes: Ray's shutdown alone has 30 s."""
JOIN = """
import json, sys
from pathlib import Path
import ray
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import _raise_if_ray_is_lost, open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import make_bundle

with open_ray_session(ClusterConfig(address=sys.argv[1])):
    [slots] = reserve([[make_bundle(1, 0)]], timeout_s=60)
    group = RankGroup("trainer", slots, Path(sys.argv[2]))
    print(json.dumps(ray.get(group._actors[0].environment.remote())))
    group.check_environment(60)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Controller]]:
    monkeypatch.delenv(FORKS, raising=False)  # ranks are to be found below their controller
    started: list[Controller] = []

    def run(then: str, stopped_s: float = 30.0, shutdown_s: float = 30.0) -> Controller:
        command = [
            sys.executable,
            "-m",
            "tests.support.cluster_controller",
            str(tmp_path / str(len(started))),
            *(then, str(stopped_s), str(shutdown_s)),
        ]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, text=True, process_group=0, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_nothing_is_left_however_two_sessions_end(start) -> None:
    first, second = start("spin"), start("sleep_long")
    of_first, of_second = processes_when_ready(first), processes_when_ready(second)
    before = [cpu_seconds(p) for p in of_second]
    time.sleep(5)
    used = {
        f"{p.pid} {p.name()}": cpu_seconds(p) - s for p, s in zip(of_second, before, strict=True)
    }
    assert sum(used.values()) < 1.0 and max(used.values()) < 0.3, (
        f"who waits keeps a core busy: {used}"
    )
    go_on(first)

    folder_of_second = session_folder(of_second)
    second.kill()
    assert left_of(of_second) == []
    assert wait_until_removed(folder_of_second)
    assert first.poll() is None and len(left_of(of_first, timeout_s=0)) == len(of_first)

    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    assert first.wait(timeout=END_S) == 130
    assert left_of(of_first, timeout_s=0) == []
    assert first.stderr.read() == ""


def test_sigterm_ends_a_session(start) -> None:
    process = start("sleep_long")
    begun = processes_when_ready(process)
    go_on(process)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(timeout=END_S) == 143
    assert left_of(begun, timeout_s=0) == []
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_nothing_is_left_of_a_start_that_was_killed(start) -> None:
    process = start("sleep_long")
    seen: dict[int, psutil.Process] = {}
    while not any("raylet" in " ".join(p.cmdline()) for p in seen.values()):
        seen |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
    time.sleep(0.5)
    seen |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
    process.kill()
    assert left_of([*seen.values()]) == []


@pytest.mark.parametrize(
    ("name", "silent"),
    [pytest.param("raylet", True, marks=pytest.mark.slow), ("gcs_server", False)],
)
def test_a_lost_ray_is_named_also_where_it_ends_its_controller_in_silence(
    start, name, silent
) -> None:
    process = start("sleep_long")
    begun = processes_when_ready(process)
    if silent:
        process.send_signal(signal.SIGSTOP)
    next(p for p in begun if p.name() == name).kill()
    if silent:
        time.sleep(0.2)
        process.kill()
    _, told = process.communicate(timeout=END_S)
    assert process.returncode == (-signal.SIGKILL if silent else 1)
    assert told.startswith(f"mcore-rl: Ray's {name} process died"), told
    assert told.count("\n") == 1, told
    assert left_of(begun) == []


@pytest.mark.slow
def test_a_stopped_gcs_is_named_and_killed(start) -> None:
    process = start("sleep_long", stopped_s=1.0)
    begun = processes_when_ready(process)
    go_on(process)
    next(p for p in begun if p.name() == "gcs_server").suspend()
    _, told = process.communicate(timeout=END_S)
    assert process.returncode == 1
    first, second = told.splitlines()
    assert first == (
        "mcore-rl: Ray's gcs_server process was stopped (state T) for 1 s and is killed"
    )
    assert second.startswith("mcore-rl: Ray's gcs_server process died"), told
    assert left_of(begun) == []


@pytest.mark.slow
def test_a_shutdown_that_waits_for_a_stopped_gcs_ends_by_force(start) -> None:
    process = start("sleep_long", stopped_s=1000.0, shutdown_s=2.0)
    begun = processes_when_ready(process)
    go_on(process)
    next(p for p in begun if p.name() == "gcs_server").suspend()
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert told.startswith("mcore-rl: Ray did not shut down within 2 s; gcs_server is stopped"), (
        told
    )
    assert told.endswith(": its processes are killed\n") and told.count("\n") == 1
    assert left_of(begun) == []


def test_an_address_without_ray_is_refused() -> None:
    address = "127.0.0.1:1"
    with (
        pytest.raises(ValueError, match=f"cluster.address={address}"),
        open_ray_session(ClusterConfig(address=address)),
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


def session_folder(processes: list[psutil.Process]) -> Path:
    arguments = [argument for p in processes for argument in p.cmdline()]
    [folder] = {
        a.split("=")[1].split("/session_")[0] for a in arguments if a.startswith("--session-dir=")
    }
    assert Path(folder).is_dir()
    return Path(folder)


def wait_until_removed(folder: Path, timeout_s: float = 20.0) -> bool:
    until = time.monotonic() + timeout_s
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return not folder.exists()


def go_on(controller: Controller) -> None:
    assert controller.stdin is not None
    controller.stdin.write("\n")
    controller.stdin.flush()


def left_of(processes: list[psutil.Process], timeout_s: float = 20.0) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


@pytest.fixture
def joined_cluster(tmp_path: Path) -> Iterator[str]:
    """Start a Ray of two cores, as on another machine: with an environment of its own."""
    port = find_free_port("127.0.0.1")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    command += [f"--object-store-memory={80 * 2**20}", "--node-ip-address=127.0.0.1"]
    environment = {k: v for k, v in os.environ.items() if k not in RAY_DEFAULTS}
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
    environment |= {"NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "WARN", "RAY_AUTH_MODE": "disabled"}
    with (tmp_path / "head.log").open("wb") as log:
        head = subprocess.Popen(
            [*command, f"--temp-dir={folder}"], stdout=log, stderr=log, env=environment
        )
    until_s = time.monotonic() + 120
    while b"Ray runtime started" not in (tmp_path / "head.log").read_bytes():
        assert head.poll() is None and time.monotonic() < until_s, log.name
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.wait(timeout=END_S)
    shutil.rmtree(folder, ignore_errors=True)


def test_ranks_of_a_joined_cluster_get_the_variables_of_the_controller(
    joined_cluster: str, tmp_path: Path
) -> None:
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, joined_cluster, str(tmp_path)],
        # A Ray that an earlier test started may have left RAY_AUTH_MODE=token here.
        env={**os.environ, "NCCL_DEBUG": "VERSION", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert joined.returncode == 0, joined.stderr
    environment = json.loads(joined.stdout)
    assert environment["NCCL_DEBUG"] == "VERSION"
    assert environment["NCCL_CUMEM_ENABLE"] == "0"
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    told = [line for line in joined.stderr.splitlines() if "instead of" in line]
    assert len(told) == 1, joined.stderr
    assert told[0].startswith("NCCL_IB_HCA is 'mlx5_0' instead of unset in rank 0 (trainer")


def test_a_child_that_is_gone_while_children_are_looked_at_is_no_lost_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = subprocess.Popen(["true"])
    child = psutil.Process(gone.pid)
    gone.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self: [child])
    with pytest.raises(psutil.NoSuchProcess):
        child.status()
    _raise_if_ray_is_lost()
