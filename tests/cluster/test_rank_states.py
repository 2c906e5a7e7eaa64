"""Nodes tell which processes of theirs are stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import ray

from mcore_rl.cluster.answers import _ask, find_states
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig

pytestmark = pytest.mark.e2e
STOPPED = "is stopped (state T; SIGCONT lets it go on)"
LEFT = "ab" * 28
"""The id of a node that is not there."""


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=1):
        yield


@pytest.fixture
def stopped_pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
        process.kill()


def test_each_process_is_asked_about_on_its_node(stopped_pid: int) -> None:
    own = ray.get_runtime_context().get_node_id()
    stopped = ray.put(stopped_pid)
    running = ray.put(os.getpid())
    places = [(running, own), (stopped, ""), (stopped, LEFT), (stopped, own)]
    began_s = time.monotonic()
    assert find_states(places) == ["", STOPPED, "", STOPPED]
    assert time.monotonic() - began_s < 10
    assert find_states([]) == []


def test_another_node_tells_the_states_of_its_processes(stopped_pid: int) -> None:
    own = ray.get_runtime_context().get_node_id()
    pids = {3: ray.put(os.getpid()), 7: ray.put(stopped_pid)}
    assert ray.get(_ask(own, pids), timeout=60) == ["", STOPPED]
