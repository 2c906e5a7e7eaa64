"""One start of a simulated run: its processes, and how they end."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.clock import replace_clock
from mcore_rl.run.roles.parity_check import make_probe
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.run import SimulatedRun, StepLog
from mcore_rl.tools.simulate.virtual_time import (
    HAND_OVER_S,
    ReachedShares,
    VirtualLoop,
    VirtualTime,
)
from mcore_rl.tools.simulate.workload import SimulatedPrompts
from mcore_rl.types import WeightVersion


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    loop = VirtualLoop()
    with replace_clock(loop.time):
        yield VirtualTime(loop)
    loop.close()


def run_of(clock: VirtualTime, folder: Path, start_step: int, *overrides: str) -> SimulatedRun:
    config = recipe(*overrides)
    costs = RecipeCosts.make(config, ReachedShares())
    return SimulatedRun(config, costs, clock, random.Random(0), start_step, RunFolder(folder))


def recipe(*overrides: str) -> Config:
    small = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "simulate.steps=3"]
    return make_checked(load_recipe("qwen3_30b_a3b_grpo_32", [*small, *overrides]))


def test_a_run_goes_on_after_the_step_that_it_starts_from(
    clock: VirtualTime, tmp_path: Path
) -> None:
    run = run_of(clock, tmp_path, 2)
    log = StepLog()
    run.train(ShuffledStream(SimulatedPrompts(9), 0, shuffle=False), log)
    assert list(log.steps) == [3]
    assert {engine.version for engine in run.engines.values()} == {3}
    assert run.trainer.saved["step"] == 3
    run.end()
    assert not asyncio.all_tasks(clock.loop)


@pytest.mark.slow
def test_engines_of_a_host_have_one_collector(clock: VirtualTime, tmp_path: Path) -> None:
    on_hosts = {"plan.ranks_per_host=8": 2, "plan.ranks_per_host=4": 4, "plan.ranks_per_host=16": 1}
    for setting, num_collectors in on_hosts.items():
        run = run_of(clock, tmp_path, 0, setting)
        assert len(run.collectors) == num_collectors, "four engines of four GPUs"
        run.end()


def test_evaluations_draw_by_their_own_options(clock: VirtualTime, tmp_path: Path) -> None:
    lens = ["simulate.response_len=500", "eval.data=[unused.parquet]", "eval.max_response_len=20"]
    run = run_of(clock, tmp_path, 0, *lens)
    weights = run.make_sync()
    weights.sync_first(WeightVersion(0), make_probe((), 0))
    generator = run.make_generator(weights)
    prompts = [SimulatedPrompts(9)[i] for i in range(4)]
    for for_eval in (False, True):
        samples = generator.generate(prompts, 2, greedy=False, seed=0, for_eval=for_eval)
        assert (max(sample.response_len for sample in samples) == 20) == for_eval
    run.end()


def test_the_first_sync_of_each_run_is_read_back(clock: VirtualTime, tmp_path: Path) -> None:
    pauses = {}
    for verify in ("destination", "transfer"):
        run = run_of(clock, tmp_path, 0, f"sync.verify={verify}")
        metrics = run.make_sync().sync_first(WeightVersion(0), make_probe((), 0))
        assert metrics["sync/engines_verified"] == (4 if verify == "destination" else 0)
        pauses[verify] = metrics["sync/pause_s"]
        run.end()
    config = recipe()
    read_back_s = RecipeCosts.make(config, ReachedShares()).read_back_s
    assert read_back_s > 0
    assert pauses["destination"] == pytest.approx(pauses["transfer"] + read_back_s)


def test_collectors_compute_advantages_of_tokens_beside_each_other(
    clock: VirtualTime, tmp_path: Path
) -> None:
    """Each takes 0.3 us for a token of its own; 8 samples of 1,200 tokens lie with 1, 2 or 4."""
    spans: dict[str, list[float]] = {}
    options = [
        "algorithm.advantage=reinforce_plus_plus",
        "simulate.response_len=1000",
        "simulate.response_spread=0",
    ]
    for ranks_per_host in (16, 8, 4):
        own = spans[str(ranks_per_host)] = []
        clock.on_span = lambda name, begin_s, end_s, own=own: (
            own.append(end_s - begin_s) if name == "advantages of tokens" else None
        )
        run = run_of(clock, tmp_path, 2, *options, f"plan.ranks_per_host={ranks_per_host}")
        run.train(ShuffledStream(SimulatedPrompts(200), 0, shuffle=False), StepLog())
        run.end()
    whole_s = 8 * 1200 * 0.3e-6
    for ranks_per_host, num_collectors in {"16": 1, "8": 2, "4": 4}.items():
        assert spans[ranks_per_host] == pytest.approx([whole_s / num_collectors + HAND_OVER_S])
