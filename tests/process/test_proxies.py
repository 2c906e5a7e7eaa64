"""Requests to the run's own servers go there, whatever proxies the environment names."""

import asyncio
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config import ServedModelConfig
from mcore_rl.process.http import open_session
from mcore_rl.process.network import bypass_proxies, open_directly, open_outside
from mcore_rl.rollout.engine import EngineProcess, make_environment
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.served_models import find_endpoint
from tests.support.engine_keys import KEYS
from tests.support.policy import python_files, read

NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
BAD = "http://127.0.0.1:9"
"""Nobody listens there."""
CLIENTS = {
    "urllib": "import urllib.request as u; print(u.urlopen('{}', timeout=9).read().decode())",
    "requests": "import requests; print(requests.get('{}', timeout=9).text)",
    "httpx": "import httpx; print(httpx.get('{}', timeout=9).text)",
    "aiohttp": "import aiohttp, asyncio\n"
    "async def ask():\n"
    "    async with aiohttp.ClientSession(trust_env=True) as http, http.get('{}') as answer:\n"
    "        print(await answer.text())\n"
    "asyncio.run(ask())",
}


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, BAD)
        monkeypatch.setenv(name.upper(), BAD)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "mine"}]}')

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urllib_alone_would_ask_the_proxy() -> None:
    # urlopen keeps the opener of its first call in this process, with the proxies of that time.
    with serving() as url, pytest.raises(OSError, match="refused"):
        urllib.request.build_opener().open(url, timeout=9)


def test_our_own_clients_ask_the_server(tmp_path: Path) -> None:
    async def ask(url: str) -> str:
        async with open_session(9.0) as http, http.get(url) as answer:
            return await answer.text()

    with serving() as url:
        assert b"mine" in open_directly(url, 9.0).read()
        assert "mine" in asyncio.run(ask(url))
        port = int(url.rpartition(":")[2])
        spec = EngineSpec(model_path="m", log_path=str(tmp_path / "log"), port=port)
        assert EngineProcess(spec).is_healthy()
        assert find_endpoint("judge", ServedModelConfig(url=url)).model == "mine"


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_of_others_ask_the_server(client: str) -> None:
    with serving() as url:
        environment = {"PATH": "/usr/bin", "http_proxy": BAD, "ALL_PROXY": BAD}
        done = subprocess.run(
            [sys.executable, "-c", CLIENTS[client].replace("{}", url)],
            env=environment | bypass_proxies(environment),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "mine" in done.stdout, done.stderr


def test_exceptions_that_the_user_made_are_kept() -> None:
    given = {"HTTPS_PROXY": BAD, "NO_PROXY": ".corp, 10.0.0.9", "no_proxy": "hub"}
    made = bypass_proxies(given, ["10.1.1.1"])
    assert made["no_proxy"] == made["NO_PROXY"]
    hosts = made["no_proxy"].split(",")
    assert hosts[:6] == ["hub", ".corp", "10.0.0.9", "localhost", "127.0.0.1", "::1"]
    assert hosts[-1] == "10.1.1.1" and len(hosts) == len(set(hosts))


def test_without_proxies_nothing_is_set() -> None:
    assert bypass_proxies({"NO_PROXY": "hub", "HTTP_PROXY": ""}) == {}


def test_each_command_makes_the_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "hub")
    monkeypatch.setenv("NO_PROXY", "hub")
    assert main(["report", "/nowhere"]) == 2
    assert os.environ["no_proxy"].startswith("hub,localhost,127.0.0.1")


def test_an_engine_is_told_its_machines(tmp_path: Path) -> None:
    spec = EngineSpec(
        model_path="m",
        log_path=str(tmp_path / "log"),
        port=1,
        host="10.9.8.7",
        node_addresses=("10.9.8.7", "10.9.8.8"),
        keys=KEYS,
    )
    environment = make_environment(spec, "/tmp/x")
    assert {"10.9.8.7", "10.9.8.8", "127.0.0.1"} <= set(environment["no_proxy"].split(","))
    assert environment["http_proxy"] == BAD


def test_a_url_outside_of_the_run_is_asked_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = urllib.request.Request("http://hooks.example.invalid/T0", method="GET")
    with serving() as url:
        monkeypatch.setenv("http_proxy", url)
        with open_outside(outside, 9.0) as answer:
            assert b"mine" in answer.read()


def test_no_client_of_ours_takes_proxies_from_the_environment() -> None:
    takers = [
        str(path)
        for path in python_files("mcore_rl", "launch", "checkpoint_tools")
        if any(word in read(path) for word in ("urlopen(", "trust_env=True", "import requests"))
    ]
    assert not takers, f"use process.proxies.open_directly or process.http.open_session: {takers}"
