"""A collector that dies, or a node with engines, costs the samples that it kept, and no more."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_clusters import seated
from tests.e2e.test_restart import assert_no_sample_lost
from tests.support.books import assert_books_balance
from tests.support.runs import Run, tiny_settings
from tests.support.submitted import SubmittedRun

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
SETTINGS = ("eval.data=[]", "checkpoint.export_hf=false")
COLLECTOR = "ray::collector_rank0"
FOUR_SAVED = ("run.steps=4", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
HELD_REWARD = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    while Path(HOLD).exists():
        time.sleep(0.05)
    return float(len(solution_str) % 2)
"""


@pytest.fixture
def three_nodes(arithmetic: Path, tmp_path: Path) -> Iterator[SubmittedRun]:
    """The trainer's node, and two with an engine and a collector each.

    No sample gets a reward while there is a file `hold` beside the run folder.
    """
    reward = tmp_path / "held_reward.py"
    reward.write_text(HELD_REWARD.replace("HOLD", repr(str(tmp_path / "hold"))))
    settings = [*tiny_settings(arithmetic), *SETTINGS, "run.steps=4", "parallel.ep=1"]
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1"]
    apart = ["cluster.separate_nodes=true", "cluster.cpus_per_rank=1", "rollout.engines=2"]
    scored = [f"reward.path={reward}", "reward.name=score", "reward.workers=1"]
    run = SubmittedRun([*settings, *nodes, *apart, *scored], tmp_path / "run")
    yield run
    run.kill()


@pytest.fixture
def spare_node(arithmetic: Path, tmp_path: Path) -> Iterator[SubmittedRun]:
    """Three nodes: one has the trainer, one the only engine and its collector, one is spare."""
    settings = [*tiny_settings(arithmetic), *SETTINGS, "run.steps=4", "parallel.ep=1"]
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1", "launch.nodes=3"]
    apart = ["cluster.separate_nodes=true", "cluster.cpus_per_rank=1", "rollout.engines=1"]
    run = SubmittedRun([*settings, *nodes, *apart], tmp_path / "run")
    yield run
    run.kill()


COLOCATED = ("cluster.colocated=true", "rollout.stage_weights=false", "rollout.restarts=0")


@pytest.fixture
def colocated(arithmetic: Path, tmp_path: Path) -> Iterator[SubmittedRun]:
    """Three nodes: two have a trainer rank and the engine on its GPU each, one is spare."""
    settings = [*tiny_settings(arithmetic), *SETTINGS, *COLOCATED, *FOUR_SAVED]
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1", "launch.nodes=3"]
    engines = ["rollout.engines=2", "cluster.cpus_per_rank=1"]
    run = SubmittedRun([*settings, *nodes, *engines], tmp_path / "run")
    yield run
    run.kill()


@pytest.mark.slow
def test_a_collector_that_dies_costs_its_samples_only(start: Start) -> None:
    run = start("train", *SETTINGS, "run.steps=4", "reward.workers=1")
    run.wait_for("step 2: rollout", poll_s=0.002)
    run.find_one(COLLECTOR).kill()
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    assert re.search(r"rank 0 \(collector.*\) died; started again, 1 of 1", run.log()), run.log()
    assert_no_sample_lost(run)
    lost = [line["rollout/lost"] for line in run.metrics() if "loss/total" in line]
    assert lost[0] == 0 and 0 < lost[1] <= 16 and lost[2:] == [0, 0], lost


@pytest.mark.slow
def test_samples_that_wait_for_their_step_are_sampled_again(start: Start) -> None:
    run = start(
        "train",
        *SETTINGS,
        "run.steps=6",
        "rollout.mode=one_step_off",
        "algorithm.correction.weight=token",
    )
    run.wait_for("step 3: train", poll_s=0.002)
    run.find_one(COLLECTOR).kill()
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert sum(line["rollout/lost"] for line in steps) > 0, steps
    whole = [line["rollout/samples"] + line.get("batch/lost", 0) for line in steps]
    assert set(whole) == {16.0}, steps


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_of_engines(three_nodes: SubmittedRun) -> None:
    run, hold = three_nodes, three_nodes.run_dir.parent / "hold"
    run.wait_for("step 1: train")
    hold.touch()
    run.wait_for("step 2: reward")
    assert [node for node, _ in seated(run)] == ["node0", "node1", "node2"]
    assert sorted(who for _, who in seated(run)) == ["engine 0", "engine 1", "trainer rank 0"]
    run.kill_raylet("127.0.0.4")
    run.wait_for("is gone with its node")
    hold.unlink()
    run.wait_ended()
    assert "node node2: Ray ended on node node2 with status" in run.printed()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 5))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    assert sum(line["rollout/lost"] for line in steps) > 0, steps
    run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_the_only_engine_moves_to_a_spare_node_with_its_collector(
    spare_node: SubmittedRun,
) -> None:
    run = spare_node
    run.wait_for("step 2: rollout", 600)
    [lost] = (node for node, who in seated(run) if who.startswith("engine"))
    run.kill_raylet(f"127.0.0.{int(lost.removeprefix('node')) + 2}")
    run.wait_for("engine 0 is up at ", 600)
    run.wait_ended(timeout_s=600)
    [spare] = {"node1", "node2"} - {lost}
    assert f"engine 0 moves from node {lost} to node {spare}" in run.controller_log()
    assert f"it goes on as rank 0 (collector, node {spare}," in run.controller_log()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 5))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    assert_books_balance(run.run_dir, num_steps=4)
    run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_the_loss_of_a_node_of_colocated_engines_ends_the_run_and_says_how_to_go_on(
    colocated: SubmittedRun, start: Start
) -> None:
    run = colocated
    run.wait_for("step 3: train", 600)
    assert sorted(who for _, who in seated(run)) == [
        "trainer rank 0; engine 0",
        "trainer rank 1; engine 1",
    ]
    lost = next(node for node, _ in seated(run) if node != "node0")
    run.kill_raylet(f"127.0.0.{int(lost.removeprefix('node')) + 2}")
    run.wait_ended(status=1, timeout_s=200)
    [address] = re.findall(rf"node {lost} \((\S+)\): trainer", run.controller_log())
    named = rf"engine http://{address}:\d+ failed|engine rank \d \(.*node {lost}.*\) died"
    assert re.search(named, run.printed()), run.printed()
    assert re.search(r"the same command goes on after step [23] of 4", run.printed())
    run.wait_until_nothing_is_left()
    again = start("train", *SETTINGS, *COLOCATED, *FOUR_SAVED, run_dir=run.run_dir)
    assert again.finish() == 0, again.tail()
    assert re.search(r"resumed from .*step_00000[23]\n", again.tail(10**6)), again.tail()
    steps = [line["step"] for line in again.metrics() if "loss/total" in line]
    assert steps == list(range(1, 5))
    assert_books_balance(run.run_dir, num_steps=4)
