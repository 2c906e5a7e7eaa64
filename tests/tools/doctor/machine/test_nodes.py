"""Several nodes: processes on one machine, with names of their own, over real gloo."""

import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.facts import NodeFacts
from mcore_rl.tools.doctor.machine.finding import ok
from mcore_rl.tools.doctor.machine.meeting import Meeting, NodePlace
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.nodes import (
    ClusterOutcome,
    check_nodes,
    judge_reach,
    judge_traffic,
)
from mcore_rl.tools.doctor.machine.traffic import PeerAnswer, TrafficFigures
from tests.support.machine_doctor import finish_doctor, reachable_interface, start_doctor


def start(folder: Path, rank: int, size: int) -> "subprocess.Popen[str]":
    place = ("--nodes", str(size), "--node-rank", str(rank), "--node-name", f"n{rank}")
    quick = ("--only", "python,interface", "--interface", reachable_interface())
    return start_doctor(*place, *quick, "--rendezvous", str(folder))


def check_both(
    folders: Sequence[Path], timeout_s: float, clock: Callable[[], float] = time.time
) -> list[ClusterOutcome]:
    """Check two nodes, each in a thread; `clock` is that of the second."""

    def check(rank: int) -> ClusterOutcome:
        place = NodePlace(rank, 2, f"n{rank}")
        needs = MachineNeeds(num_nodes=2, interface=reachable_interface())
        own_clock = clock if rank else time.time
        own = [ok("python", "3.11").name_node(place.name)]
        return check_nodes(folders[rank], place, needs, own, timeout_s, own_clock)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(check, range(2)))


@pytest.mark.gloo
@pytest.mark.slow
def test_three_nodes_meet_and_node_0_reports_for_all(tmp_path: Path) -> None:
    first, *others = [finish_doctor(p) for p in [start(tmp_path, r, 3) for r in range(3)]]
    assert [run.status for run in (first, *others)] == [0, 0, 0], first
    assert all(not run.findings for run in others)
    assert {f.node for f in first.outcome("python")} == {"n0", "n1", "n2"}
    for check, nodes in {
        "same versions": [""],
        "same environment": [""],
        "shared folder": ["n1", "n2"],
        "shared lock": ["n1", "n2"],
        "clock": ["n1", "n2"],
        "connections": [""],
    }.items():
        found = first.outcome(check)
        assert [(f.node, f.outcome) for f in found] == [(node, "ok") for node in nodes], found
    [traffic] = first.outcome("traffic gloo")
    assert traffic.figures["slowest_gb_per_s"] > 0 and traffic.figures["all_to_all_gb_per_s"] > 0
    assert first.summary["nodes"] == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gloo
@pytest.mark.slow
def test_a_clock_that_is_ahead_fails_all_nodes_with_its_offset(tmp_path: Path) -> None:
    first, second = check_both([tmp_path, tmp_path], 30.0, lambda: time.time() + 45)
    assert (first.failed, first.shown) == (True, True)
    assert (second.failed, second.shown) == (True, False)
    [clock] = [f for f in first.findings if f.outcome == "failed"]
    assert (clock.check, clock.node) == ("clock", "n1")
    assert clock.figures["offset_s"] == pytest.approx(45, abs=0.5)
    assert clock.figures["uncertainty_s"] < 0.5


def test_a_node_that_ends_on_the_way_is_named(tmp_path: Path) -> None:
    def come_and_go() -> None:
        with Meeting(tmp_path, NodePlace(1, 2, "late"), 10.0):
            pass

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(come_and_go)
        outcome = check_nodes(tmp_path, NodePlace(0, 2, "n0"), MachineNeeds(), [], 1.0)
        gone.result(10)
    assert outcome.failed and outcome.shown
    [finding] = outcome.findings
    assert finding.text.startswith("node 1 of 2 did not put facts into ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_is_a_failure_on_every_node(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for outcome, absent, folder in zip(check_both(folders, 0.5), (1, 0), folders, strict=True):
        assert outcome.failed and outcome.shown
        own, finding = outcome.findings
        assert own.check == "python", "its own findings are shown as well"
        assert finding.outcome == "failed"
        assert f"node {absent}" in finding.text and f"did not come to {folder}" in finding.text
        assert "whether this folder is the same there: here its filesystem /" in finding.remedy


FACTS = [NodeFacts(name, name, "10.0.0.1", "eth0", {}, {}, ()) for name in "abc"]


def figures(*pairs: dict[int, float], error: str = "") -> list[TrafficFigures]:
    return [TrafficFigures(rates, 1.0, error) for rates in pairs]


@pytest.mark.parametrize(
    ("told", "outcome", "text"),
    [
        (figures({1: 9, 2: 9}, {0: 9, 2: 8}, {0: 9, 1: 9}), "ok", "8.00 to 9.00 GB/s"),
        (figures({1: 9, 2: 9}, {0: 9, 2: 2}, {0: 9, 1: 9}), "warning", "slowest b and c"),
        (figures({1: 0.1}, {0: 0.1}), "warning", "0.10 to 0.10 GB/s"),
        (figures({}, {}, error="ended with status 1: no"), "failed", "ended with status 1: no"),
    ],
)
def test_a_slow_pair_is_named_and_an_error_fails(told, outcome: str, text: str) -> None:
    finding = judge_traffic("gloo", told, FACTS)[0]
    assert finding.outcome == outcome
    assert text in finding.text


def test_a_node_that_does_not_reach_another_is_named_with_the_address() -> None:
    good, bad = PeerAnswer(), PeerAnswer("10.0.0.2 port 5: timed out")
    [finding] = judge_reach([[good, bad, good], [good] * 3, [good] * 3], FACTS)
    assert (finding.node, finding.outcome) == ("a", "failed")
    assert finding.text == "does not reach b at 10.0.0.2 port 5: timed out"
    [finding] = judge_reach([[good] * 3] * 3, FACTS)
    assert (finding.outcome, finding.text) == ("ok", "all pairs, over eth0")
