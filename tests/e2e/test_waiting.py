"""Processes that wait use no CPU: an idle run is measured, process by process."""

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SECONDS = 6.0
MAX_SHARE = 0.1


def test_nothing_spins_while_it_waits_for_a_rank_or_an_engine(start: Callable[..., Run]) -> None:
    run = start("train", "run.steps=500", "eval.data=[]", "checkpoint.export_hf=false")
    run.wait_for("step 2: train")
    for name in ("trainer_rank0", "sglang::scheduler", "sglang::detokenizer"):
        run.find_one(name)  # so that it is remembered
    shares = shares_without(run, run.find_one("trainer_rank1"))
    assert max(shares.values()) < MAX_SHARE, shares
    scheduler = run.find_one("sglang::scheduler")
    next_step = run.log().count(": rollout") + 1
    run.wait_for(f"step {next_step}: rollout", poll_s=0.002)
    shares = shares_without(run, scheduler)
    assert max(shares.values()) < MAX_SHARE, shares
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60) == 130, run.tail()
    run.assert_nothing_left()


def shares_without(run: Run, stopped: psutil.Process) -> dict[str, float]:
    """Return the share of a core that each process uses while all of them wait for `stopped`."""
    stopped.suspend()
    try:
        run.cpu_shares(2.0)
        shares = run.cpu_shares(SECONDS)
    finally:
        stopped.resume()
    assert sum("trainer_rank" in name or "sglang" in name for name in shares) >= 4, shares
    print({name: round(share, 3) for name, share in shares.items()})
    return shares
