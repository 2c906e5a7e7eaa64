"""Processes on one machine share its cores: what they slow, and what they leave alone."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.tools.simulate.virtual_time import Machine, VirtualLoop, WorkClock


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


Job = tuple[WorkClock, float, float]
"""The clock of its processes, when it begins, and its seconds of work."""


def ends(loop: VirtualLoop, *jobs: Job) -> list[float]:
    """Return when each job ends."""

    async def run(clock: WorkClock, begin_s: float, seconds: float) -> float:
        await asyncio.sleep(begin_s)
        await clock.work(seconds)
        return loop.time()

    async def run_all() -> list[float]:
        return await asyncio.gather(*(run(*job) for job in jobs))

    return loop.run_until_complete(run_all())


@pytest.mark.parametrize(("num_cores", "end_s"), [(1, 20), (2, 10), (3, 10)])
def test_two_jobs_take_twice_as_long_on_one_core_only(
    loop: VirtualLoop, num_cores: int, end_s: float
) -> None:
    machine = Machine(num_cores)
    jobs = [(WorkClock(loop, {machine: [1.0]}), 0.0, 10.0) for _ in range(2)]
    assert ends(loop, *jobs) == [pytest.approx(end_s)] * 2


def test_a_job_that_begins_half_way_slows_the_rest_of_the_other(loop: VirtualLoop) -> None:
    machine = Machine(1)
    first, second = (WorkClock(loop, {machine: [1.0]}) for _ in range(2))
    # 5 seconds alone, 10 together for 5 of each, then the second has 5 left for itself.
    assert ends(loop, (first, 0, 10), (second, 5, 10)) == pytest.approx([15, 20])


def test_more_processes_take_more_of_the_cores(loop: VirtualLoop) -> None:
    machine = Machine(2)
    ranks, engine = WorkClock(loop, {machine: [1.0, 1.0]}), WorkClock(loop, {machine: [1.0]})
    assert ends(loop, (ranks, 0, 6), (engine, 0, 4)) == pytest.approx([8, 6])


def test_who_wants_less_than_an_even_share_gets_it_and_the_others_share_the_rest(
    loop: VirtualLoop,
) -> None:
    machine = Machine(2)
    small, rank = WorkClock(loop, {machine: [0.2]}), WorkClock(loop, {machine: [0.8, 0.4]})
    engine = WorkClock(loop, {machine: [1.0, 0.4]})
    # 0.2 + 0.4 + 0.4 of two cores are taken; the other two processes get half a core each.
    assert ends(loop, (small, 0, 1), (rank, 0, 0.5), (engine, 0, 0.4)) == pytest.approx(
        [1, 0.8, 0.8]
    )


def test_ranks_on_several_machines_wait_for_the_most_crowded(loop: VirtualLoop) -> None:
    crowded, free = Machine(1), Machine(1)
    ranks = WorkClock(loop, {crowded: [1.0], free: [1.0]})
    here, there = WorkClock(loop, {crowded: [1.0]}), WorkClock(loop, {crowded: [1.0]})
    assert ends(loop, (ranks, 0, 10), (here, 0, 10), (there, 0, 10)) == pytest.approx([30] * 3)


def test_other_machines_are_not_slowed(loop: VirtualLoop) -> None:
    crowded, other = Machine(1), Machine(1)
    clocks = [WorkClock(loop, {machine: [1.0]}) for machine in (crowded, crowded, other)]
    assert ends(loop, *((clock, 0, 10) for clock in clocks)) == pytest.approx([20, 20, 10])


def test_without_machines_the_clock_is_that_of_the_loop(loop: VirtualLoop) -> None:
    clocks = [WorkClock(loop, {}) for _ in range(9)]
    assert ends(loop, *((clock, 0.1 * k, 3.3) for k, clock in enumerate(clocks))) == [
        0.1 * k + 3.3 for k in range(9)
    ]
    assert clocks[0].time() == loop.time()


def test_a_canceled_job_gives_its_core_back(loop: VirtualLoop) -> None:
    machine = Machine(1)
    first, second = (WorkClock(loop, {machine: [1.0]}) for _ in range(2))

    async def run() -> float:
        job = asyncio.create_task(first.work(100))
        loop.call_later(4, job.cancel)
        await second.work(10)
        return loop.time()

    assert loop.run_until_complete(run()) == pytest.approx(12)
    assert machine.level == 1


def test_alarms_ring_by_the_clock_unless_they_are_canceled(loop: VirtualLoop) -> None:
    machine = Machine(1)
    clock, other = WorkClock(loop, {machine: [1.0]}), WorkClock(loop, {machine: [1.0]})
    rung: list[tuple[str, float]] = []

    async def run() -> None:
        clock.begin()
        for name, when_s in (("early", 2), ("late", 6), ("never", 4)):
            alarm = clock.call_at(when_s, lambda name=name: rung.append((name, loop.time())))
            if name == "never":
                loop.call_at(5, alarm.cancel)
        await asyncio.sleep(3)
        await other.work(100)

    loop.run_until_complete(run())
    assert rung == [("early", 2), ("late", pytest.approx(9))]


def expected_ends(num_cores: int, jobs: list[tuple[int, float, float]]) -> list[float]:
    """Return the end of each job (processes, begin, seconds), from one change to the next."""
    now_s = 0.0
    left = [seconds for _, _, seconds in jobs]
    ended = [0.0] * len(jobs)
    while any(left):
        later = [begin_s for _, begin_s, _ in jobs if begin_s > now_s]
        active = [k for k, (_, begin_s, _) in enumerate(jobs) if begin_s <= now_s and left[k]]
        speed = min(1.0, num_cores / max(sum(jobs[k][0] for k in active), 1))
        step_s = min([begin_s - now_s for begin_s in later] + [left[k] / speed for k in active])
        now_s += step_s
        for k in active:
            left[k] = left[k] - step_s * speed if left[k] > step_s * speed + 1e-12 else 0.0
            ended[k] = now_s
    return ended


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 3), st.floats(0, 20), st.floats(0.1, 20)), max_size=8),
)
def test_all_jobs_end_when_an_even_share_of_the_cores_lets_them(
    num_cores: int, jobs: list[tuple[int, float, float]]
) -> None:
    loop = VirtualLoop()
    machine = Machine(num_cores)
    clocks = [WorkClock(loop, {machine: [1.0] * num}) for num, _, _ in jobs]
    ended = ends(loop, *((c, b, s) for c, (_, b, s) in zip(clocks, jobs, strict=True)))
    loop.close()
    assert ended == pytest.approx(expected_ends(num_cores, jobs), abs=1e-6)
    assert machine.level == 1, "all cores are free again"
