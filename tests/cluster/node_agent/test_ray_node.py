"""Ray's processes of a node start on ports of their own, join by a token, and end."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cluster.node_agent.job import Rendezvous
from mcore_rl.cluster.node_agent.ray_node import JoinedNodes, RayNode, RayProcesses
from mcore_rl.cluster.process_tags import make_ray_temp_dir, tag_processes
from mcore_rl.process.variables import restore_variables

pytestmark = pytest.mark.e2e
JOIN = """
import sys, time
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
began = time.monotonic()
try:
    with open_ray_session(ClusterConfig(address=sys.argv[1])):
        print("joined")
except ValueError as error:
    print(error, time.monotonic() - began)
"""


def facts(name: str, address: str) -> RayNode:
    return RayNode(name, name, address, 1, 0, 80, {"engine_node": 1.0})


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.slow
def test_a_second_node_joins_the_first_with_the_token_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.open()
    rendezvous.make_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(rendezvous.token))
    with restore_variables(), make_ray_temp_dir() as temp_dir, tag_processes(str(temp_dir)):
        head = RayProcesses(facts("a", "127.0.0.2"), None, temp_dir, tmp_path / "ray_a.log")
        joined = JoinedNodes(head.head_address, 2, tmp_path)
        wait_until(lambda: list(joined.names()) == ["a"])

        wrong = tmp_path / "wrong"
        wrong.write_text("0" * 64)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
        (temp_dir / "b").mkdir()
        stranger = RayProcesses(
            facts("b", "127.0.0.3"), head.head_address, temp_dir / "b", tmp_path / "ray_b.log"
        )
        wait_until(lambda: stranger.exit_status() is not None)
        assert stranger.exit_status() != 0
        refused = subprocess.run(
            [sys.executable, "-c", JOIN, head.head_address], capture_output=True, text=True
        )
        assert "it wants another token: set RAY_AUTH_MODE=token" in refused.stdout
        assert float(refused.stdout.split()[-1]) < 5

        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(rendezvous.token))
        (temp_dir / "c").mkdir()
        other = RayProcesses(
            facts("c", "127.0.0.3"), head.head_address, temp_dir / "c", tmp_path / "ray_c.log"
        )
        wait_until(lambda: set(joined.names()) == {"a", "c"})
        assert head.exit_status() is None and other.exit_status() is None
        joined.end()
        other.stop()
        head.stop()
        head.keep_logs()
        assert {path.name for path in (tmp_path / "ray_a").iterdir()} >= {"raylet.out"}
        assert json.loads((tmp_path / "joined.json").read_text())
    host, _, port = head.head_address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
    assert not os.path.exists(temp_dir)
