"""A worker restarts the server it looks after, within limits; a few lines play SGLang's part."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.process.clock import replace_clock
from mcore_rl.process.errors import ProcessLostError
from mcore_rl.process.process_state import HOUR_S
from mcore_rl.rollout.engine import FORKS
from mcore_rl.rollout.engine_health import EngineState
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.workers.engine_worker import EngineWorker, RestartCounts, limit_silence
from tests.support.engine_keys import KEYS

SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        while self.path == "/server_info" and os.path.exists("stuck"):
            time.sleep(0.01)
        self.send_response(503 if os.path.exists("sick") else 200)
        self.end_headers()

print("begun with", sys.argv[sys.argv.index("--model-path") + 1], flush=True)
if os.path.exists("broken"):
    sys.exit("no such model")
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
NO_RESTARTS = [RestartCounts(0, 0)] * 2
Make = Callable[..., EngineWorker]


@pytest.fixture
def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make workers whose servers run SERVER: Python finds its module first in PYTHONPATH."""
    package = tmp_path / "mcore_rl" / "rollout"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(FORKS, raising=False)
    workers = []

    def make(max_restarts: int, node_rank: int = 0, stopped_s: float = 30.0) -> EngineWorker:
        spec = EngineSpec(
            "model",
            str(tmp_path / "log"),
            num_nodes=1 + node_rank,
            node_rank=node_rank,
            dist_init_addr="a:1",
            keys=KEYS,
        )
        worker = EngineWorker(spec, 1, 20.0, max_restarts, stopped_s, lambda: "127.0.0.1")
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker._engine.stop()


def test_a_healthy_server_is_left_alone(make_worker: Make) -> None:
    worker = make_worker(max_restarts=1)
    pid, url = worker.pid(), worker.address().url
    assert worker.check(NO_RESTARTS) == EngineState(url, restarts=0, healthy=True)
    assert worker.check([RestartCounts(5, 5), RestartCounts(0, 0)]) == EngineState(
        url, restarts=0, healthy=True
    )
    assert worker.pid() == pid


def test_a_dead_server_is_started_again_at_its_address_until_restarts_are_used_up(
    make_worker: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = make_worker(max_restarts=1)
    pid, url = worker.pid(), worker.address().url
    kill(worker)
    assert worker.check(NO_RESTARTS) == EngineState(url, restarts=1, healthy=False)
    assert worker.address().url == url and worker.pid() != pid
    assert worker.address().keys == KEYS
    printed = capsys.readouterr().out
    assert "died (status -9); its last lines:\n  | begun with model\n" in printed
    assert "starting it again, 1 of 1 restarts in an hour" in printed
    assert wait_until_healthy(worker) == EngineState(url, restarts=1, healthy=True)
    kill(worker)
    lost = rf"(?s)engine {url} .*died \(status -9\); its last lines.*its 1 restarts of an hour"
    with pytest.raises(ProcessLostError, match=lost):
        worker.check(NO_RESTARTS)
    with replace_clock(lambda: time.monotonic() + HOUR_S):
        restarts = worker.check(NO_RESTARTS).restarts
    assert restarts == 2, "an hour later it may be restarted again"


def test_a_server_is_restarted_with_the_others_of_its_engine_once_they_are_stopped(
    make_worker: Make,
) -> None:
    worker = make_worker(max_restarts=2, node_rank=1)
    process = psutil.Process(worker.pid())
    other = RestartCounts(0, 0)
    for _ in range(2):
        state = worker.check([other, RestartCounts(0, 1)])
        assert (state.restarts, state.healthy) == (1, False)
        assert not process.is_running() and not worker._engine.is_alive()
    assert worker.check([other, RestartCounts(1, 1)]).restarts == 1
    assert worker._engine.is_alive()
    kill(worker)
    assert worker.check([other, RestartCounts(1, 1)]).restarts == 2
    assert not worker._engine.is_alive(), "the others do not know that it died"
    worker.check([other, RestartCounts(2, 2)])
    assert worker._engine.is_alive()


def test_a_server_whose_scheduler_does_not_answer_is_killed_unless_it_takes_weights(
    make_worker: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = make_worker(max_restarts=1)
    url, silence_s = worker.address().url, limit_silence(worker._engine.spec.batch_timeout_s)
    start_s = time.monotonic()

    def check_at(later_s: float, *, takes_weights: bool = False) -> EngineState:
        with replace_clock(lambda: start_s + later_s):
            return worker.check(NO_RESTARTS, takes_weights)

    Path("stuck").touch()
    healthy = EngineState(url, restarts=0, healthy=True)
    assert check_at(100.0) == healthy, "it is asked"
    assert check_at(99.0 + silence_s) == healthy
    assert check_at(200.0 + silence_s, takes_weights=True) == healthy
    assert check_at(199.0 + 2 * silence_s) == healthy
    assert check_at(201.0 + 2 * silence_s) == EngineState(url, restarts=1, healthy=False)
    assert f"did not answer for {silence_s + 1:.0f} s and is killed" in capsys.readouterr().out
    Path("stuck").unlink()
    assert wait_until_healthy(worker).restarts == 1


def test_time_in_which_nobody_asked_is_no_silence(make_worker: Make) -> None:
    worker = make_worker(max_restarts=0)
    for hours in range(1, 4):
        with replace_clock(lambda hours=hours: time.monotonic() + hours * HOUR_S):
            assert worker.check(NO_RESTARTS).restarts == 0
        heartbeat = worker._heartbeat
        assert heartbeat is not None and heartbeat._asking is not None
        heartbeat._asking.join(20.0)
        assert heartbeat._silent_since_s is None


def test_a_restarted_server_must_get_healthy_in_time(make_worker: Make) -> None:
    worker = make_worker(max_restarts=1)
    Path("sick").touch()
    kill(worker)
    worker.check(NO_RESTARTS)
    worker._healthy_until = time.monotonic() - 1.0
    with pytest.raises(
        ProcessLostError, match="was started again but not healthy after 20 s; its last"
    ):
        worker.check(NO_RESTARTS)


def test_a_stopped_server_is_named_killed_and_replaced(
    make_worker: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = make_worker(max_restarts=1, stopped_s=0.5)
    pid, url = worker.pid(), worker.address().url
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert worker.check(NO_RESTARTS) == EngineState(url, healthy=True), "not for long enough"
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
    time.sleep(0.6)
    assert worker.check(NO_RESTARTS).restarts == 0, "it goes on"
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    worker.check(NO_RESTARTS)
    time.sleep(0.6)
    assert worker.check(NO_RESTARTS) == EngineState(url, restarts=1, healthy=False)
    printed = capsys.readouterr().out
    assert f"was stopped (state T of process {pid}) for 0.5 s and is killed" in printed
    assert wait_until_healthy(worker) == EngineState(url, restarts=1, healthy=True)


def test_a_server_that_does_not_start_is_lost_with_its_log(make_worker: Make) -> None:
    Path("broken").touch()
    with pytest.raises(ProcessLostError, match=r"(?s)exited with status 1 .* \| no such model"):
        make_worker(max_restarts=3)


def kill(worker: EngineWorker) -> None:
    os.kill(worker.pid(), signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while worker._engine.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_until_healthy(worker: EngineWorker) -> EngineState:
    deadline = time.monotonic() + 20.0
    while not (state := worker.check(NO_RESTARTS)).healthy:
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state
