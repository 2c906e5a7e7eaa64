"""A supervised server is started again at its address, and leaves nothing behind."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.process import supervised
from mcore_rl.process.network import find_free_port
from mcore_rl.process.supervised import SupervisedServer, SupervisedSpec

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("key", open(sys.argv[3]).read() if len(sys.argv) > 2 else "none", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): ...
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WAIT_S = 120.0
Begin = Callable[..., SupervisedServer]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """begin(code, **fields of the spec) -> server; it is stopped at the end."""
    started: list[SupervisedServer] = []

    def begin_server(code: str = SERVER, **fields: Any) -> SupervisedServer:
        port = find_free_port("127.0.0.1")
        command = (sys.executable, "-c", code, str(port))
        health = f"http://127.0.0.1:{port}/healthz"
        log = tmp_path / "logs" / "server.log"
        spec = SupervisedSpec("the server", command, health, log, **fields)
        started.append(SupervisedServer(spec))
        return started[-1]

    yield begin_server
    for server in started:
        server.stop()


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s, f"no {what} after {WAIT_S:g} s"
        time.sleep(0.05)


def test_a_killed_server_is_started_again_at_its_address(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables stay those of the moment when it was made: threads may set others since."""
    monkeypatch.setenv("MADE_WITH", "this")
    server = begin()
    monkeypatch.setenv("MADE_WITH", "another")
    server.wait_healthy(WAIT_S)
    for count in (1, 2):
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda count=count: server.num_restarts == count, "restart")
        wait_until(server.is_healthy, "answer")
        assert server.pid != killed
        assert psutil.Process(server.pid).environ()["MADE_WITH"] == "this"


SILENT = SERVER.replace(
    "    def do_GET(self):",
    "    num_asked = 0\n    def do_GET(self):\n        Handler.num_asked += 1\n"
    "        import time; time.sleep(1000 if Handler.num_asked > 2 else 0)",
)
"""It answers twice, and then no more."""


def test_a_server_that_falls_silent_is_ended_and_started_again(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_ANSWER_S", 1.0)
    monkeypatch.setattr(supervised, "_LOOK_EVERY_S", 0.2)
    server = begin(SILENT, silent_s=2.0)
    server.wait_healthy(WAIT_S)
    wait_until(lambda: server.num_restarts == 1, "restart")


def test_a_server_that_is_stopped_is_ended_soon_and_started_again(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervised, "_STOPPED_S", 1.0)
    server = begin(silent_s=1000.0)
    server.wait_healthy(WAIT_S)
    assert server.pid is not None
    silent = psutil.Process(server.pid)
    silent.suspend()
    wait_until(lambda: server.num_restarts == 1, "restart")
    wait_until(server.is_healthy, "answer")
    assert not silent.is_running() and "was stopped for 1 s; it is started again" in caplog.text


def test_a_stop_ends_the_server_and_what_it_started(begin: Begin) -> None:
    server = begin()
    server.wait_healthy(WAIT_S)
    assert server.pid is not None
    process = psutil.Process(server.pid)
    family = [process, *process.children(recursive=True)]
    assert len(family) == 2
    server.stop()
    wait_until(lambda: not any(map(is_alive, family)), "end")
    assert server.num_restarts == 0
    server.stop()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_key_travels_neither_in_arguments_nor_in_the_environment(
    begin: Begin, tmp_path: Path
) -> None:
    server = begin(key="a secret of the run")
    server.wait_healthy(WAIT_S)
    assert (tmp_path / "logs" / "server.log").read_text() == "key a secret of the run\n"
    process = psutil.Process(server.pid)
    assert "a secret" not in " ".join([*process.cmdline(), *process.environ().values()])


def test_a_server_that_ends_at_its_start_is_not_tried_again(begin: Begin) -> None:
    server = begin("print('there is no disk'); raise SystemExit(4)")
    with pytest.raises(
        RuntimeError, match=r"(?s)ended with status 4 at its start.*there is no dis"
    ):
        server.wait_healthy(WAIT_S)


def test_a_server_that_never_answers_is_an_error_in_time(begin: Begin) -> None:
    server = begin("import time; time.sleep(600)")
    with pytest.raises(TimeoutError, match="waited 1 s for the server"):
        server.wait_healthy(1.0)
    assert server.pid is not None and not psutil.pid_exists(server.pid)


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = SupervisedSpec("it", ("true",), "http://127.0.0.1:1", tmp_path / "file" / "log")
    with pytest.raises(ValueError, match="the log of it"):
        SupervisedServer(spec)
