"""Replayed failures: closed formulas, what a run cannot survive, and where its time goes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.tools.simulate.fault_replay import (
    EffectiveTime,
    FaultCosts,
    StepCosts,
    find_interval_s,
    replay,
)
from mcore_rl.tools.simulate.recovery_costs import CheckpointCosts, RecoveryCosts

IN_TURN = StepCosts(100.0, 40.0, 50.0, 10.0, is_beside=False, refill_s=0.0)
BESIDE = replace(IN_TURN, is_beside=True)
FREE = RecoveryCosts(keep_s=0.0, mirror_s=0.0, notice_s=0.0, replace_s=60.0, load_s=0.0)
UNBOUNDED = 10**9
NEVER = FaultCosts(
    step=IN_TURN,
    recovery=FREE,
    checkpoints=CheckpointCosts(save_s=0.0, write_s=0.0, load_s=0.0),
    restart_s=300.0,
    engine_s=0.0,
    rank_mtbf_s=math.inf,
    engine_mtbf_s=math.inf,
    save_every=1,
    most_recoveries=UNBOUNDED,
)


def agrees(way: EffectiveTime, expected: float) -> bool:
    """Whether it differs by sampling alone, which it does by chance once in thousands."""
    assert 0 < way.error < 0.02
    return abs(way.effective - expected) < 4 * way.error


@pytest.mark.parametrize(
    ("mtbf_s", "save_every"),
    [(600.0, 1), (600.0, 7), (3000.0, 1), (3000.0, 40), (40_000.0, 7), (40_000.0, 40)],
)
def test_restarts_take_the_time_of_dalys_formula(mtbf_s: float, save_every: int) -> None:
    """J. T. Daly 2006, equation (13): the mean time until a checkpoint is written."""
    saves = CheckpointCosts(save_s=5.0, write_s=0.0, load_s=20.0)
    costs = replace(NEVER, checkpoints=saves, rank_mtbf_s=mtbf_s, save_every=save_every)
    segment_s = save_every * 100.0 + 5.0
    mean_s = mtbf_s * math.exp(320.0 / mtbf_s) * math.expm1(segment_s / mtbf_s)
    way = replay(costs, 40_000, 0, recovers=False)
    assert agrees(way, save_every * 100.0 / mean_s)


@pytest.mark.parametrize("recovery_s", [1000.0, 9000.0])
def test_recoveries_take_the_time_of_their_formula(recovery_s: float) -> None:
    """Work that is cut off is done again, a loss in the wait costs a recovery alone."""
    mtbf_s = 36_000.0
    step = StepCosts(9000.0, 4000.0, 4500.0, 500.0, is_beside=False, refill_s=0.0)
    recovery = replace(FREE, keep_s=200.0, replace_s=recovery_s)
    costs = replace(NEVER, step=step, recovery=recovery, rank_mtbf_s=mtbf_s)

    def done_again(seconds: float) -> float:
        return mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(seconds / mtbf_s)

    recovered_s = mtbf_s * math.expm1(recovery_s / mtbf_s)
    waited_s = 4500.0 - math.expm1(-4500.0 / mtbf_s) * recovered_s
    mean_s = done_again(4200.0) + waited_s + done_again(500.0)
    assert agrees(replay(costs, 40_000, 0, recovers=True), 9000.0 / mean_s)


@pytest.mark.parametrize(("recovery_s", "wait_s"), [(20.0, 50.0), (200.0, 50.0), (50.0, 200.0)])
def test_ranks_with_gpus_of_their_own_recover_while_engines_sample(
    recovery_s: float, wait_s: float
) -> None:
    """A recovery that begins in the wait costs what is longer than the rest of the wait."""
    mtbf_s = 100_000.0
    step = replace(IN_TURN, ideal_s=wait_s + 50.0, wait_s=wait_s, is_apart=True)
    costs = replace(
        NEVER, step=step, recovery=replace(FREE, replace_s=recovery_s), rank_mtbf_s=mtbf_s
    )
    hidden_s = recovery_s - recovery_s**2 / 2 / wait_s if recovery_s < wait_s else wait_s / 2
    in_work_s = 40.0 * (recovery_s + 20.0) + 10.0 * (recovery_s + 5.0)
    lost_s = (in_work_s + wait_s * (recovery_s - hidden_s)) / mtbf_s
    way = replay(costs, 100_000, 0, recovers=True)
    assert agrees(way, step.ideal_s / (step.ideal_s + lost_s))
    later = replay(replace(costs, step=replace(step, is_apart=False)), 100_000, 0, recovers=True)
    assert later.effective < way.effective


def test_each_lost_engine_delays_the_run_by_its_seconds() -> None:
    costs = replace(NEVER, engine_s=30.0, engine_mtbf_s=500.0)
    for recovers in (True, False):
        way = replay(costs, 40_000, 0, recovers=recovers)
        assert agrees(way, 1 - 30 / 500)
        assert way.shares["engines"] == pytest.approx(1 - way.effective)


def test_without_failures_all_time_but_copies_and_saves_is_effective() -> None:
    recovery = replace(FREE, keep_s=3.0)
    saves = CheckpointCosts(save_s=8.0, write_s=50.0, load_s=0.0)
    costs = replace(NEVER, recovery=recovery, checkpoints=saves, save_every=4)
    assert replay(costs, 800, 0, recovers=True).effective == pytest.approx(100 / 105)
    restarts = replay(costs, 800, 0, recovers=False)
    assert (restarts.effective, restarts.error) == (pytest.approx(100 / 102), pytest.approx(0))
    nothing = replay(NEVER, 1000, 0, recovers=True)
    assert nothing.effective == 1.0 and sum(nothing.shares.values()) == 0.0


def test_both_ways_meet_the_same_failures() -> None:
    """Without copies, waits and a single recovery, partner memory is a restart."""
    step = StepCosts(100.0, 90.0, 0.0, 10.0, is_beside=False, refill_s=0.0)
    engines = {"engine_s": 3.0, "engine_mtbf_s": 400.0}
    costs = replace(NEVER, step=step, rank_mtbf_s=900.0, most_recoveries=0, save_every=3, **engines)
    way = replay(costs, 2000, 5, recovers=True)
    assert way == replay(costs, 2000, 5, recovers=False)
    assert way.counts["ranks lost"] > 200 and way.counts["engines lost"] > 500
    assert way != replay(costs, 2000, 6, recovers=True)


def test_samples_that_engines_draw_meanwhile_hide_recoveries_and_copies() -> None:
    recovery = replace(FREE, keep_s=5.0, replace_s=30.0)
    costs = replace(NEVER, recovery=recovery, rank_mtbf_s=2000.0)
    in_turn = replay(costs, 20_000, 0, recovers=True)
    beside = replay(replace(costs, step=BESIDE), 20_000, 0, recovers=True)
    assert in_turn.shares["copies"] / in_turn.effective == pytest.approx(0.05)
    assert beside.shares["copies"] < 0.005
    # A loss while ranks wait shows when the wait is over: it is never hidden.
    assert 0.5 < beside.shares["recoveries"] / in_turn.shares["recoveries"] < 0.8


def test_a_copy_that_reaches_the_partner_late_delays_the_step() -> None:
    late = replace(NEVER, recovery=replace(FREE, mirror_s=75.0))
    assert replay(late, 100, 0, recovers=True).shares["copies"] == pytest.approx(15 / 115)
    assert replay(late, 100, 0, recovers=False).shares.get("copies", 0.0) == 0.0


def test_more_recoveries_in_an_hour_than_allowed_end_the_run() -> None:
    costs = replace(NEVER, rank_mtbf_s=1200.0, most_recoveries=4)
    few, many = (
        replay(replace(costs, most_recoveries=most), 20_000, 0, recovers=True) for most in (4, 100)
    )
    assert few.counts["restarts"] > 100 and "restarts" not in many.counts
    assert few.effective < many.effective


def test_a_checkpoint_counts_once_it_is_written() -> None:
    costs = replace(NEVER, rank_mtbf_s=2000.0)
    slow = replace(costs, checkpoints=CheckpointCosts(save_s=0.0, write_s=90.0, load_s=0.0))
    at_once, later = (replay(each, 20_000, 0, recovers=False) for each in (costs, slow))
    # A loss comes before the write is done with probability 1 - exp(-90 / 2000), and costs a step.
    more = later.shares["work done again"] - at_once.shares["work done again"]
    assert more == pytest.approx(0.9 * 100 / 2000, rel=0.25)


@pytest.mark.parametrize("mtbf_s", [10.0, 1e-3, 1e-12])
@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.timeout(20)
def test_losses_that_let_no_step_end_are_named(mtbf_s: float, recovers: bool) -> None:
    way = replay(replace(NEVER, rank_mtbf_s=mtbf_s), 100, 0, recovers=recovers)
    assert way.effective == 0.0
    assert way.no_step.startswith("no step ended after step 0 in 1,000 losses of ranks")


@pytest.mark.timeout(20)
def test_a_checkpoint_that_is_never_reached_is_named() -> None:
    rare = replace(NEVER, rank_mtbf_s=200.0, save_every=1000)
    assert "no step ended after step" in replay(rare, 10_000, 0, recovers=False).no_step


def test_engines_that_are_lost_faster_than_the_run_catches_up_are_named() -> None:
    costs = replace(NEVER, engine_s=30.0, engine_mtbf_s=29.0)
    assert replay(costs, 100, 0, recovers=True).no_step.startswith("engines are lost every 29 s")


seconds = st.floats(0.0, 100.0)


@settings(deadline=None, max_examples=60)
@given(
    step=st.builds(
        StepCosts,
        *(st.just(50.0), seconds, seconds, seconds, st.booleans(), seconds, st.booleans()),
    ),
    recovery=st.builds(RecoveryCosts, seconds, seconds, seconds, seconds, seconds),
    saves=st.builds(CheckpointCosts, seconds, seconds, seconds),
    mtbf_s=st.floats(1000.0, 1e6),
    save_every=st.integers(1, 9),
    most=st.integers(0, 5),
    recovers=st.booleans(),
)
def test_all_time_is_either_effective_or_lost_to_something(
    step: StepCosts,
    recovery: RecoveryCosts,
    saves: CheckpointCosts,
    mtbf_s: float,
    save_every: int,
    most: int,
    recovers: bool,
) -> None:
    step = replace(step, work_s=step.work_s + 0.1)
    own = {"step": step, "recovery": recovery, "checkpoints": saves, "save_every": save_every}
    often = {"rank_mtbf_s": mtbf_s, "engine_mtbf_s": mtbf_s / 2, "engine_s": 20.0}
    way = replay(replace(NEVER, **own, **often, most_recoveries=most), 100, 1, recovers=recovers)
    assert not way.no_step
    assert way.effective + sum(way.shares.values()) == pytest.approx(1.0)
    assert all(share > -1e-9 for what, share in way.shares.items() if "slow" not in what)


@pytest.mark.parametrize("save_s", [1.0, 30.0])
@pytest.mark.parametrize("mtbf_s", [2000.0, 30_000.0])
def test_the_best_interval_is_none_of_its_neighbors(save_s: float, mtbf_s: float) -> None:
    step = StepCosts(10.0, 6.0, 3.0, 1.0, is_beside=False, refill_s=0.0)
    costs = replace(NEVER, step=step, rank_mtbf_s=mtbf_s, restart_s=10.0)
    best = max(1, round(find_interval_s(save_s, mtbf_s) / 10.0))
    saves = CheckpointCosts(save_s=save_s, write_s=0.0, load_s=0.0)
    effective = [
        replay(replace(costs, checkpoints=saves, save_every=every), 40_000, 0, recovers=False)
        for every in (max(best // 3, 1), best, 3 * best)
    ]
    assert effective[1].effective >= effective[0].effective
    assert effective[1].effective > effective[2].effective
