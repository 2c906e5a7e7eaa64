"""Simulates a recipe to its end, through failures, and sums up what it found."""

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.clock import replaced_clock
from mcore_rl.tools.simulate.failures import RunLostError
from mcore_rl.tools.simulate.recipe_costs import RecipeCosts
from mcore_rl.tools.simulate.run import SimulatedRun
from mcore_rl.tools.simulate.step_log import StepLog
from mcore_rl.tools.simulate.timeline import Timeline
from mcore_rl.tools.simulate.virtual_loop import CONTROLLER, VirtualLoop
from mcore_rl.tools.simulate.virtual_time import VirtualTime
from mcore_rl.tools.simulate.workload import SimulatedPrompts, prompt_len_of
from mcore_rl.types import Prompt

MOST_STARTS = 1000
"""After so many starts a run that loses its ranks before each save is given up."""


@dataclass
class _Totals:
    """Sums over all starts of the run."""

    engine_busy_s: float = 0.0
    engine_s: float = 0.0
    running_s: float = 0.0
    trainer_busy_s: float = 0.0
    num_tokens: float = 0.0
    num_retracted: int = 0
    num_engines_lost: int = 0
    num_nodes: int = 0
    num_nodes_lost: int = 0
    num_samples_lost: int = 0
    """Samples under way that were lost with a collector."""
    most_stored_tokens: int = 0
    losses: list[str] = field(default_factory=list)

    def add(self, run: SimulatedRun, seconds: float) -> None:
        for engine in run.engines.values():
            self.engine_busy_s += engine.busy_s
            self.running_s += engine.running_seconds
            self.num_tokens += engine.num_tokens
            self.num_retracted += engine.num_retracted
            self.engine_s += seconds
        self.trainer_busy_s += run.trainer.busy_s
        self.num_engines_lost += run.failures.num_engines_lost
        self.num_nodes = run.num_nodes
        self.num_nodes_lost += run.failures.num_nodes_lost
        self.num_samples_lost += run.num_samples_lost
        stored = sum(collector.store.most_tokens for collector in run.collectors)
        self.most_stored_tokens = max(self.most_stored_tokens, stored)


@dataclass(frozen=True)
class SimulationResult:
    """Outcome of a simulation: a summary, the metrics of each step, and what happened when."""

    summary: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, float]]
    timeline: Timeline


def simulate(config: Config, costs: RecipeCosts) -> SimulationResult:
    """Run simulate.steps steps. Raises RuntimeError if the run is lost too often to end."""
    began = time.perf_counter()
    loop = VirtualLoop()
    clock = VirtualTime(loop)
    timeline = Timeline()
    clock.on_span = timeline.add_span
    log = StepLog()
    totals = _Totals()
    try:
        with replaced_clock(loop.time), tempfile.TemporaryDirectory() as folder:
            stream = _run_to_end(config, costs, clock, log, totals, timeline, RunFolder(folder))
    finally:
        loop.close()
    wall_s = time.perf_counter() - began
    simulating_s = clock.in_loop_s - loop.cpu_s[CONTROLLER] + clock.predicting_s
    controller_s = wall_s - simulating_s
    summary = _summarize(config, log, totals, loop.time(), controller_s)
    summary |= {
        "prompts_unaccounted": len(
            log.unaccounted(stream.state_dict(), config.rollout.samples_per_prompt)
        ),
        "real_seconds": wall_s,
        "events": loop.num_events,
    }
    return SimulationResult(summary, log.steps, timeline)


def gpus_of(config: Config) -> int:
    """Return the GPUs of trainer, critic and engines."""
    num_gpus = config.parallel.world_size
    if needs_of(config.algorithm).critic and not config.critic.colocated:
        num_gpus += config.critic.parallel.world_size
    if not config.cluster.colocated:
        num_gpus += config.rollout.engines * config.rollout.engine_ranks
    return num_gpus


def _run_to_end(
    config: Config,
    costs: RecipeCosts,
    clock: VirtualTime,
    log: StepLog,
    totals: _Totals,
    timeline: Timeline,
    folder: RunFolder,
) -> ShuffledStream[Prompt]:
    """Start the run again after each loss; return the prompts' stream of the last start."""
    draw = random.Random(config.run.seed)
    saved: dict[str, Any] = {}
    loop = clock.loop
    for _ in range(MOST_STARTS):
        prompts = SimulatedPrompts(prompt_len_of(config), config.simulate.prompts)
        stream = ShuffledStream(prompts, config.run.seed, shuffle=False)
        if saved:
            stream.load_state_dict(saved["prompts"])
        start_s = loop.time()
        run = SimulatedRun(config, costs, clock, draw, saved.get("step", 0), folder)
        for engine in run.engines.values():
            engine.on_change = timeline.new_queue() if not totals.losses else engine.on_change
        try:
            run.train(stream, log)
            return stream
        except RunLostError as error:
            timeline.marks.append((loop.time(), str(error)))
            totals.losses.append(str(error))
            saved = run.trainer.saved or saved
            log.go_back(saved.get("step", 0))
        finally:
            run.end()
            totals.add(run, loop.time() - start_s)
        loop.run_until_complete(asyncio.sleep(config.simulate.restart_s))
    raise RuntimeError(
        f"the run was lost {MOST_STARTS} times, last as {totals.losses[-1]}: raise"
        f" simulate.mtbf_hours={config.simulate.mtbf_hours:g}, or save more often"
        f" (checkpoint.every_steps={config.checkpoint.every_steps})"
    )


def _summarize(
    config: Config, log: StepLog, totals: _Totals, seconds: float, controller_s: float
) -> dict[str, Any]:
    # The first step of a run has no samples from before, and later ones do.
    later = [metrics for step, metrics in log.steps.items() if step > 1] or [log.steps[1]]
    num_steps = len(log.steps)

    def mean(name: str) -> float:
        return fmean(metrics.get(name, 0.0) for metrics in later)

    step_s = mean("time/step")
    num_gpus = gpus_of(config)
    tokens = fmean(m["rollout/samples"] * m["rollout/response_len"] for m in later)
    return {
        "gpus": num_gpus,
        "nodes": totals.num_nodes,
        "steps": num_steps,
        "seconds": seconds,
        "step_s": step_s,
        "phases_s": {
            name: mean(f"time/{name}")
            for name in ("rollout", "reward", "logprobs", "train", "pause", "sync", "checkpoint")
        },
        "response_tokens_per_second_per_gpu": tokens / step_s / num_gpus,
        "trainer_busy": totals.trainer_busy_s / seconds,
        "engines_busy": totals.engine_busy_s / totals.engine_s,
        "running_per_engine": totals.running_s / max(totals.engine_busy_s, 1e-9),
        "retracted": totals.num_retracted,
        "staleness_mean": mean("staleness/mean"),
        "sync_s": mean("sync/seconds"),
        "stored_tokens": totals.most_stored_tokens,
        "engines_lost": totals.num_engines_lost,
        "nodes_lost": totals.num_nodes_lost,
        "samples_lost": totals.num_samples_lost,
        "runs_lost": len(totals.losses),
        "controller_cpu_s_per_step": controller_s / num_steps,
        "controller_share": controller_s / num_steps / step_s,
    }
