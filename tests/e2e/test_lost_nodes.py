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
from tests.support.victims import PHASES

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
SETTINGS = ("eval.data=[]", "checkpoint.export_hf=false")
COLLECTOR = "ray::collector_rank0"
GONE = "is gone with its node"
IS_UP = "it serves after a weight sync"
HELD_REWARD = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    while Path(HOLD).exists():
        time.sleep(0.05)
    return float(len(solution_str) % 2)
"""


def hold_rewards(folder: Path) -> list[str]:
    """Return settings by which no sample gets a reward while there is a file `hold`."""
    reward = folder / "held_reward.py"
    reward.write_text(HELD_REWARD.replace("HOLD", repr(str(folder / "hold"))))
    return [f"reward.path={reward}", "reward.name=score", "reward.workers=1"]


@pytest.fixture
def three_nodes(arithmetic: Path, tmp_path: Path) -> Iterator[SubmittedRun]:
    """The trainer's node, and two with an engine and a collector each.

    No sample gets a reward while there is a file `hold` beside the run folder.
    """
    settings = [*tiny_settings(arithmetic), *SETTINGS, "run.steps=4", "parallel.ep=1"]
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1"]
    apart = ["cluster.separate_nodes=true", "cluster.cpus_per_rank=1", "rollout.engines=2"]
    run = SubmittedRun([*settings, *nodes, *apart, *hold_rewards(tmp_path)], tmp_path / "run")
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
def colocated(arithmetic: Path, tmp_path: Path) -> Iterator[Callable[..., SubmittedRun]]:
    """Submits a run whose two trainer ranks have a node and an engine each; others are spare.

    Rewards are held as those of three_nodes.
    """
    settings = [*tiny_settings(arithmetic), *SETTINGS, *COLOCATED, *hold_rewards(tmp_path)]
    nodes = ["launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=1"]
    engines = ["rollout.engines=2", "cluster.cpus_per_rank=1"]
    runs: list[SubmittedRun] = []

    def submit(num_nodes: int, *more: str) -> SubmittedRun:
        own = [f"launch.nodes={num_nodes}", *more]
        runs.append(SubmittedRun([*settings, *nodes, *engines, *own], tmp_path / "run"))
        return runs[-1]

    yield submit
    for run in runs:
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
    run.wait_for(GONE)
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
    kill_node(run, lost)
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
@pytest.mark.timeout(1200)
def test_ranks_and_engines_of_a_lost_node_go_on_together_on_a_spare_one(
    colocated: Callable[..., SubmittedRun], tmp_path: Path
) -> None:
    """A node is lost while ranks train, and another one while samples are scored.

    Samples that are lost with the second one are drawn again by the engine that is left. The node
    of the controller is not killed.
    """
    run, hold = colocated(4, "run.steps=6"), tmp_path / "hold"
    run.wait_for("step 2: train", 600)
    assert sorted(who for _, who in seated(run)) == [
        "trainer rank 0; engine 0",
        "trainer rank 1; engine 1",
    ]
    first, other = list_seats(run)
    kill_node(run, first)
    run.wait_for("step 3: train", 600)
    hold.touch()
    run.wait_for("step 4: reward", 600)
    [(_, place)] = find_moves(run)
    second = other if place == "node0" else place
    kill_node(run, second)
    run.wait_until(lambda: GONE in run.controller_log().partition("step 4: reward")[2], GONE, 600)
    hold.unlink()
    run.wait_ended(timeout_s=600)
    assert [lost for lost, _ in find_moves(run)] == [first, second]
    assert run.printed().count("recovered step") == 2, run.printed()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    whole = [line["rollout/samples"] + line["batch/lost"] for line in steps]
    assert set(whole) == {16.0} and steps[3]["rollout/lost"] > 0, steps
    assert run.controller_log().count(IS_UP) == 2
    assert steps[-1]["sync/engines_failed"] == 0, "both engines serve"
    assert_books_balance(run.run_dir, num_steps=6)
    run.wait_until_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_and_engines_that_are_left_go_on_where_no_node_is_spare(
    colocated: Callable[..., SubmittedRun],
) -> None:
    smaller = ("run.recovery.min_dp=1", "parallel.dp=2", "parallel.ep=1", "cluster.offload=true")
    run = colocated(2, "run.steps=6", *smaller)
    run.wait_for("step 2: train", 600)
    kill_node(run, list_seats(run)[0])
    run.wait_ended(timeout_s=600)
    assert re.search(r"engine \d is left out: no node has trainer rank \d", run.controller_log())
    steps = [line for line in run.metrics() if "loss/total" in line]
    sizes = [line["recovery/dp"] for line in steps]
    assert sizes[0] == 2 and sizes[-2:] == [1, 1], sizes
    whole = [line["rollout/samples"] + line["batch/lost"] for line in steps]
    assert set(whole) == {16.0}, steps
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    assert_books_balance(run.run_dir, num_steps=6)
    run.wait_until_nothing_is_left()


def list_seats(run: SubmittedRun) -> list[str]:
    """Return the nodes with ranks and engines; the controller's node is the last one."""
    return sorted((node for node, _ in seated(run)), key=lambda node: node == "node0")


def kill_node(run: SubmittedRun, node: str) -> None:
    run.kill_raylet(f"127.0.0.{int(node.removeprefix('node')) + 2}")


def find_moves(run: SubmittedRun) -> list[tuple[str, str]]:
    """Return the nodes from and to which engines have moved."""
    return re.findall(r"engine \d moves from node (\S+) to node (\S+)", run.controller_log())


@pytest.mark.slow
def test_the_only_engine_beside_ranks_is_lost_alone_with_them_and_while_they_save(
    start: Start,
) -> None:
    run = start("train", *SETTINGS, *COLOCATED, "run.steps=6", "checkpoint.every_steps=1")
    for num_before, (step, phase, victims) in enumerate(
        (
            (2, "rollout", ("sglang::scheduler",)),
            (3, "rollout", ("engine_rank0", "trainer_rank0")),
            (4, "train", ("engine_rank0",)),
            (5, "checkpoint", ("trainer_rank1",)),
        )
    ):
        run.wait_until(lambda n=num_before: run.log().count(IS_UP) == n, "engine", 300)
        processes = [run.find_one(words) for words in victims]
        run.wait_for(PHASES[phase].format(step=step), 300, poll_s=0.002)
        for process in processes:
            process.kill()
    assert run.finish(300) == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/mean"] for line in steps) < 1e-4
    assert run.log().count(IS_UP) == 3
    assert_books_balance(run.run_dir, num_steps=6)
