"""Nodes that do not come together are named; whole jobs run in tests/e2e/test_clusters.py."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster.node_agent.agent import FAREWELL_S
from mcore_rl.cluster.node_agent.job import FAILED, Note, Rendezvous

pytestmark = pytest.mark.e2e


def agent(
    name: str, folder: Path, timeout_s: float, *options: str
) -> subprocess.CompletedProcess[str]:
    words = f"--name {name} --names a,b --addresses 127.0.0.2,127.0.0.3 --timeout-s {timeout_s}"
    command = [sys.executable, "-m", "mcore_rl.cluster.node_agent", *words.split()]
    return subprocess.run(
        [*command, *options, "--folder", str(folder), "--", "train", "recipe=tiny_moe_grpo"],
        capture_output=True,
        text=True,
        timeout=60 + timeout_s + FAREWELL_S,
    )


@pytest.mark.slow
def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    done = agent("a", tmp_path, timeout_s=20)
    assert done.returncode == 1
    assert "after 20 s 1 of 2 nodes are in Ray. Node b has not started: it wrote" in done.stderr
    assert Rendezvous(tmp_path).status() == 1, "the others are told"
    running = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if str(tmp_path) in words]


def test_a_node_whose_head_never_comes_names_it(tmp_path: Path) -> None:
    done = agent("b", tmp_path, timeout_s=2)
    assert done.returncode == 1
    assert "node b waited 2 s for node a to start Ray: it wrote nothing to" in done.stderr


def test_the_failure_of_another_node_ends_the_wait(tmp_path: Path) -> None:
    Rendezvous(tmp_path).note(1, Note(FAILED, "no such interface"))
    done = agent("a", tmp_path, timeout_s=60)
    assert done.returncode == 1 and "node b: no such interface" in done.stderr


@pytest.mark.slow
def test_a_node_without_the_interface_tells_the_others(tmp_path: Path) -> None:
    done = agent("b", tmp_path, 5, "--interface", "ib7")
    assert done.returncode == 2 and "launch.interface=ib7" in done.stderr
    note = Rendezvous(tmp_path).note_of(1)
    assert note is not None and note.phase == FAILED and "launch.interface=ib7" in note.text


@pytest.mark.slow
def test_a_node_that_comes_after_the_end_leaves(tmp_path: Path) -> None:
    Rendezvous(tmp_path).finish(3)
    done = agent("b", tmp_path, timeout_s=2)
    assert (done.returncode, done.stderr) == (0, "")
