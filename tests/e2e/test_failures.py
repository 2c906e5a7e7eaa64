"""Killed ranks, engines and controllers: one clear message, nothing left behind, and a resume that works."""

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
LONG = ("run.steps=500", "eval.data=[]", "checkpoint.every_steps=1", "checkpoint.export_hf=false")


def trainer_rank(run: Run) -> psutil.Process:
    return run.find("trainer_rank")[0]


def engine(run: Run) -> psutil.Process:
    return run.find("sglang::scheduler")[0]


@pytest.mark.parametrize(
    ("phase", "victim", "message"),
    [
        ("step 3: rollout", engine, "engine"),
        ("step 3: train", trainer_rank, "trainer rank"),
        ("step 3: refit", engine, "engine"),
    ],
    ids=["engine-in-rollout", "rank-in-train", "engine-in-refit"],
)
def test_a_killed_part_ends_the_run_with_a_message_and_resumes(
    start: Start, phase: str, victim: Callable[[Run], psutil.Process], message: str
) -> None:
    run = start("train", *LONG)
    run.wait_for(phase)
    victim(run).send_signal(signal.SIGKILL)
    assert run.finish(90) == 1, run.tail()
    assert message in run.tail(), run.tail()
    run.assert_nothing_left()
    if victim is trainer_rank:
        again = start("train", *LONG, "run.steps=4", run_dir=run.run_dir)
        assert again.finish() == 0, again.tail()
        assert [line["step"] for line in again.metrics() if "loss/total" in line][-1] == 4


@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_killed_or_interrupted_controller_leaves_nothing(
    start: Start, signal_number: int, status: int
) -> None:
    run = start("train", *LONG)
    run.wait_for("step 2: train")
    run.process.send_signal(signal_number)
    assert run.finish(60) == status, run.tail()
    run.assert_nothing_left()
