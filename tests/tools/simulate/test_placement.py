"""Which processes of a recipe share the cores of a machine."""

from collections.abc import Iterator

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import RunSize
from mcore_rl.tools.simulate.placement import (
    BESIDE_ENGINE_CORES,
    PIPELINE_RANK_CORES,
    RANK_CORES,
    ProcessPlacement,
)
from mcore_rl.tools.simulate.virtual_time import VirtualLoop, WorkClock


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def place(loop: VirtualLoop, *overrides: str) -> ProcessPlacement:
    settings = ("simulate.gpu=cpu", "cluster.cpus_per_rank=1", *overrides)
    config = load_recipe("tiny_moe_grpo", list(settings))
    size = RunSize.make(config, "train")
    hardware = config.simulate.cores, config.plan.ranks_per_host
    return ProcessPlacement.make(loop, size, config.rollout, config.cluster, *hardware)


def seconds_of(loop: VirtualLoop, clock: WorkClock, beside: WorkClock) -> float:
    """Return how long a second of work takes while `beside` works, too."""

    async def run() -> float:
        began_s = loop.time()
        beside.begin()
        await clock.work(1.0)
        beside.end()
        return loop.time() - began_s

    return loop.run_until_complete(run())


BESIDE = sum(BESIDE_ENGINE_CORES)


@pytest.mark.parametrize(
    ("cores", "overrides", "seconds"),
    [
        (0, (), 1.0),
        (8, (), 1.0),
        (2, (), 3 * RANK_CORES / (2 - BESIDE)),
        (2, ("parallel.ep=1", "parallel.pp=2"), 3 * PIPELINE_RANK_CORES / (2 - BESIDE)),
        (2, ("parallel.ep=1",), 2 / (2 - BESIDE)),
        (2, ("cluster.separate_nodes=true", "cluster.address=ray"), 1.0),
        (1, (), 2 * RANK_CORES),
    ],
)
def test_ranks_and_an_engine_slow_one_another_on_the_same_machine_only(
    loop: VirtualLoop, cores: int, overrides: tuple[str, ...], seconds: float
) -> None:
    """On machines of one core, half a CPU for each of two ranks leaves none to the engine."""
    placement = place(loop, f"simulate.cores={cores}", "cluster.cpus_per_rank=0.5", *overrides)
    [engine] = placement.engines
    assert seconds_of(loop, placement.trainer, beside=engine) == pytest.approx(seconds)


def test_engines_of_several_ranks_fill_further_machines(loop: VirtualLoop) -> None:
    placement = place(loop, "simulate.cores=4", "rollout.engines=3", "rollout.tp=2")
    first, second, third = placement.engines
    # Two ranks of the trainer and two of the first engine have the first machine.
    assert seconds_of(loop, second, beside=placement.trainer) == pytest.approx(1)
    assert seconds_of(loop, third, beside=second) == pytest.approx(4 / (4 - 2 * BESIDE))
    assert seconds_of(loop, first, beside=second) == pytest.approx(1)


def test_colocated_engines_are_where_the_ranks_are(loop: VirtualLoop) -> None:
    colocated = ("cluster.colocated=true", "rollout.stage_weights=false", "rollout.restarts=0")
    placement = place(loop, "simulate.cores=1", "rollout.engines=2", *colocated)
    first, second = placement.engines
    alone_s = seconds_of(loop, first, beside=second)
    assert seconds_of(loop, first, beside=placement.trainer) > alone_s


def test_processes_that_fit_no_machine_are_named(loop: VirtualLoop) -> None:
    message = r"reserve 2 CPUs of one machine.*simulate\.cores=1.*lower cluster\.cpus_per_rank"
    with pytest.raises(ValueError, match=message):
        place(loop, "simulate.cores=1", "rollout.tp=2")
