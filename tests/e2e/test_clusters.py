"""Runs on two nodes: two Rays of this machine, and a real SLURM of two nodes on it."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.doors import answers_http, answers_without_key, listening_sockets
from tests.support.runs import tiny_settings
from tests.support.submitted import SubmittedRun

pytestmark = pytest.mark.e2e
Submit = Callable[..., SubmittedRun]
TWO_NODES = ("launch.gpus_per_node=0", "launch.cpus_per_node=2", "launch.start_timeout_s=100")
LOCAL = ("launch=local", *TWO_NODES)
SLURM = ("launch=slurm", *TWO_NODES, "launch.memory_gib_per_node=2")
APART = ("cluster.separate_nodes=true", "eval.data=[]")
FOUR_STEPS = (
    "run.steps=4",
    "checkpoint.every_steps=1",
    "checkpoint.asynchronous=false",  # complete before the next step begins
    *APART,
)


@pytest.fixture
def submit(arithmetic: Path, tmp_path: Path) -> Iterator[Submit]:
    runs: list[SubmittedRun] = []

    def submit_run(*settings: str) -> SubmittedRun:
        run_dir = tmp_path / f"run {len(runs)}"
        runs.append(SubmittedRun([*tiny_settings(arithmetic), *settings], run_dir))
        return runs[-1]

    yield submit_run
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def uninterrupted(
    arithmetic: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SubmittedRun]:
    """Four steps on two nodes of the target `local`."""
    settings = [*tiny_settings(arithmetic), *LOCAL, *FOUR_STEPS]
    run = SubmittedRun(settings, tmp_path_factory.mktemp("uninterrupted") / "run")
    yield run
    run.kill()


@pytest.mark.slow
def test_trainer_and_engine_sit_on_nodes_of_their_own(uninterrupted: SubmittedRun) -> None:
    run = uninterrupted
    assert "2 nodes of 0 GPUs and 2 CPUs (1 for the trainer, 1 for engines)" in run.told
    run.wait_ended()
    assert seated(run) == [("node0", "trainer ranks 0-1"), ("node1", "engine 0")]
    assert "run folder:" in run.mcore_rl("logs", str(run.run_dir))
    run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_a_job_that_is_queued_again_ends_as_one_that_was_not_interrupted(
    slurm: None, submit: Submit, uninterrupted: SubmittedRun
) -> None:
    run = submit(*SLURM, *FOUR_STEPS)
    run.wait_for("step 2: train")
    assert re.fullmatch(r"job \d+ runs on n\[1-2\] for \S+ of \S+", run.status())
    scontrol("requeue", run.job.id)
    run.wait_until(lambda: " waits (BeginTime, restart 1)" in run.status(), "second place in queue")
    run.wait_until_nothing_is_left()
    scontrol("update", f"jobid={run.job.id}", "starttime=now")
    run.wait_ended()
    assert seated(run) == [("n1", "trainer ranks 0-1"), ("n2", "engine 0")] * 2
    assert re.search(r"resumed from .+/step_00000[123]\n", run.printed())
    assert "run folder:" in run.printed(), "both attempts print to one log"

    uninterrupted.wait_ended()
    for name in ("loss/total", "train/grad_norm", "reward/mean"):
        assert values(run, name) == values(uninterrupted, name), name
    assert exported(run) == exported(uninterrupted)
    run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_a_job_saves_and_is_queued_again_before_its_time_is_over(
    slurm: None, submit: Submit
) -> None:
    run = submit(
        *SLURM, *APART, "run.steps=500", "launch.time_limit=1", "launch.save_before_end_s=30"
    )
    run.wait_until(lambda: " waits (BeginTime, restart 1)" in run.status(), "requeue", poll_s=1.0)
    [saved] = (run.run_dir / "checkpoints").glob("step_*")
    assert f"stopped on request after step {int(saved.name[5:])} of 500" in run.printed()
    run.wait_until_nothing_is_left()
    run.mcore_rl("cancel", str(run.run_dir))
    assert "CANCELLED" in run.status()


@pytest.mark.slow
def test_nothing_is_left_of_a_job_that_is_canceled(slurm: None, submit: Submit) -> None:
    run = submit(*SLURM, *APART, "run.steps=500")
    run.wait_for("step 1: rollout")
    assert len(run.processes()) > 10
    run.mcore_rl("cancel", str(run.run_dir))
    run.wait_until(lambda: " ended: CANCELLED" in run.status(), "end")
    run.wait_until_nothing_is_left()


@pytest.mark.slow
def test_a_drained_node_is_named_while_its_job_waits(slurm: None, submit: Submit) -> None:
    scontrol("update", "nodename=n2", "state=drain", "reason=broken_fan")
    try:
        run = submit(*SLURM, *APART)
        run.wait_until(lambda: "out of service: n2 drained: broken_fan" in run.status(), "n2")
        run.mcore_rl("cancel", str(run.run_dir))
    finally:
        scontrol("update", "nodename=n2", "state=resume")


@pytest.mark.slow
def test_a_lost_node_is_named_and_nothing_is_left_on_the_other(submit: Submit) -> None:
    """Each node has a rank of the trainer and a server of the engine, which consists of two."""
    run = submit(
        *("launch=local", "launch.gpus_per_node=0", "launch.cpus_per_node=2"),
        *("cluster.cpus_per_rank=1", "rollout.tp=2", "rollout.nodes_per_engine=2"),
        *("run.steps=500", "eval.data=[]"),
    )
    run.wait_for("step 2: train")
    assert seated(run) == [
        ("node0", "trainer rank 0; engine 0 (part 1 of 2)"),
        ("node1", "trainer rank 1; engine 0 (part 2 of 2)"),
    ]
    assert_doors_are_closed(run)
    run.kill_raylet("127.0.0.3")
    run.wait_ended(status=1)
    assert re.search(r"node node1: Ray ended on node node1 with status", run.printed())
    assert re.search(r"rank \d \(.*node node1\) died", run.printed())
    run.wait_until_nothing_is_left()


def assert_doors_are_closed(run: SubmittedRun) -> None:
    """Only Ray, which wants its token, listens beyond its node; nobody answers a stranger."""
    listening = dict(listening_sockets(run.processes()))
    assert len(listening) > 10
    open_to_all = {at: who for at, who in listening.items() if at[0] in ("0.0.0.0", "::")}
    of_ray = ("raylet", "gcs_server", "ray::", "python")  # the controller is a python
    assert all(who.startswith(of_ray) for who in open_to_all.values()), open_to_all
    answers = {at: who for at, who in listening.items() if answers_http("127.0.0.2", at[1])}
    assert answers == {}
    [url] = re.findall(r"engine (http://\S+) is linked", run.controller_log())
    assert set(answers_without_key(url).values()) <= {401, 403}


def scontrol(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True, timeout=60)


def seated(run: SubmittedRun) -> list[tuple[str, str]]:
    """Return (node, who sits there) as the controller logged it."""
    return re.findall(r"cluster\.run: node (\S+) \(\S+\): (.*)", run.controller_log())


def values(run: SubmittedRun, name: str) -> dict[float, float]:
    return {row["step"]: row[name] for row in run.metrics() if name in row}


def exported(run: SubmittedRun) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.run_dir / "hf").glob("*.safetensors")}
