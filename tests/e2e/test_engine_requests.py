"""Engines that join and leave a run while it goes on, by `mcore-rl engines`."""

import re
from collections.abc import Callable

import pytest

from mcore_rl.cli import main
from tests.support.books import assert_books_balance
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
ASYNC = ("rollout.mode=async", "algorithm.correction.weight=token", "rollout.deterministic=false")
NUM_STEPS = 40


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ASYNC], ids=["sync", "async"])
def test_engines_join_and_leave_a_run(
    start: Start, mode: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The second engine takes the work of the first one, which then leaves."""
    settings = ("cluster.cpus_per_rank=0.5", "eval.data=[]", "checkpoint.export_hf=false")
    run = start("train", *settings, *mode, f"run.steps={NUM_STEPS}")

    def request(*words: str) -> tuple[int, str]:
        action, *rest = words
        status = main(["engines", action, str(run.run_dir), *rest])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    run.wait_for("step 2: rollout", 300)
    status, table = request("list")
    assert status == 0 and re.search(r"(?m)^0 +http://\S+ +this node +serves version \d+$", table)
    assert request("drain", "5") == (2, "mcore-rl: there is no engine 5: the run has [0]\n")
    status, told = request("add")
    assert status == 0 and told.startswith("engine 1 is up at http://"), told
    run.wait_until(
        lambda: re.search(r"(?m)^1 .* serves version", request("list")[1]), "a sync", 200
    )
    status, told = request("drain", "0")
    assert status == 0 and told.startswith("engine 0 has ended"), told
    status, table = request("list")
    assert status == 0 and len(table.splitlines()) == 2, table
    status, told = request("drain", "1")
    assert status == 2 and "0 engines would serve, fewer than rollout.min_engines=1" in told
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    status, told = request("list")
    assert status == 2 and "no command that takes requests runs in" in told
    balance = assert_books_balance(run.run_dir, NUM_STEPS)
    assert balance.by_engine.keys() == {0, 1}, balance.by_engine
    steps = [row for row in run.metrics() if "loss/total" in row]
    assert {row["rollout/samples"] for row in steps} == {16.0}
    assert max(row["sync/parity_diff"] for row in steps) < 1e-4
