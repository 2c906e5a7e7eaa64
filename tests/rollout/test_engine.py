"""Starting, failing and stopping one engine: its messages, and the processes that are left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.device.sglang_setup import rank_cpus
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.support.engines import live_processes, save_tiny_moe, wait_until_gone

START_AND_WAIT = """
import sys, time
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
engine = EngineProcess(EngineSpec(model_path=sys.argv[1], log_path=sys.argv[2]))
engine.start()
print(engine.pid, flush=True)
engine.wait_healthy()
print("healthy", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "expected"),
    [
        (1, [0, 1], "0,1"),
        (2, [0, 1], "0|1"),
        (2, [0, 1, 2, 3], "0,1|2,3"),
        (2, [4, 6, 7], "4|6"),
        (4, [0, 1], "0|1|0|1"),
    ],
)
def test_ranks_share_the_cores(num_ranks, cpus, expected):
    assert rank_cpus(num_ranks, cpus) == expected


def test_free_ports_and_those_derived_from_them_are_no_ephemeral_ones():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20000 <= find_free_port("127.0.0.1") < low - 246 for _ in range(20))


@pytest.mark.slow
@pytest.mark.e2e
def test_failed_start_shows_the_log_and_leaves_nothing(tmp_path):
    engine = EngineProcess(
        EngineSpec(model_path=str(tmp_path / "no_such_model"), log_path=str(tmp_path / "log"))
    )
    engine.start()
    with pytest.raises(
        RuntimeError, match=r"engine http.* exited with status \d+ while starting"
    ) as failure:
        engine.wait_healthy()
    assert str(tmp_path / "log") in str(failure.value)
    assert "no_such_model" in str(failure.value).split("last lines", 1)[1]
    assert live_processes(engine.pid) == []


@pytest.mark.e2e
def test_start_has_a_deadline_and_a_second_stop_does_nothing(model_path, tmp_path, monkeypatch):
    engine = EngineProcess(EngineSpec(model_path=model_path, log_path=str(tmp_path / "log")))
    engine.start()
    with pytest.raises(
        TimeoutError, match=r"waited 0 s for engine http.* to become healthy; its last lines"
    ):
        engine.wait_healthy(timeout_s=0.1)
    assert live_processes(engine.pid) == []
    monkeypatch.setattr(
        os, "killpg", lambda *_: pytest.fail("a process of that number is another one by now")
    )
    engine.stop()


@pytest.mark.e2e
@pytest.mark.parametrize("moment", ["starting", "healthy"])
def test_killing_the_parent_leaves_no_orphan(moment, model_path, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, model_path, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    if moment == "healthy":
        assert parent.stdout.readline() == "healthy\n"
        assert len(live_processes(engine_pid)) >= 3
    else:
        time.sleep(1.0)
        assert live_processes(engine_pid)
    parent.kill()
    parent.wait()
    assert wait_until_gone(engine_pid, timeout_s=5.0) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_losing_a_scheduler_ends_the_engine(model_path, tmp_path):
    spec = EngineSpec(model_path=model_path, log_path=str(tmp_path / "log"))
    with EngineProcess(spec) as engine:
        scheduler = min(pid for pid in live_processes(engine.pid) if pid != engine.pid)
        os.kill(scheduler, signal.SIGKILL)
        assert wait_until_gone(engine.pid, timeout_s=15.0) == []
        deadline = time.monotonic() + 2.0
        while engine.is_alive():  # its threads end after its first one
            assert time.monotonic() < deadline
        assert engine.exit_status == -signal.SIGKILL
