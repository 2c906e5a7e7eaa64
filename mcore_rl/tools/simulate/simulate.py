"""Simulates a recipe to its end, through failures, and sums up what it found.

A timeline of what happened is drawn as a picture, and written as a trace for Perfetto.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from mcore_rl.config import Config, SimulateConfig
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.planning.bundles import RunSize
from mcore_rl.process.clock import replace_clock
from mcore_rl.process.disk import write_whole
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.placement import RunLostError
from mcore_rl.tools.simulate.recovery_costs import CheckpointCosts
from mcore_rl.tools.simulate.run import SimulatedRun, StepLog
from mcore_rl.tools.simulate.virtual_time import CONTROLLER, VirtualLoop, VirtualTime
from mcore_rl.tools.simulate.workload import SimulatedPrompts, prompt_len_of
from mcore_rl.types import Prompt

SHOWN_ENGINES = 32
"""More would make the trace too large to open."""
INTERVAL_S = 0.5
"""Changes of an engine's queue within this time are one."""
COLORS = {
    "trainer step": "#4c72b0",
    "trainer log-probs": "#64b5cd",
    "critic": "#8172b2",
    "parity check": "#ccb974",
}


class Timeline:
    """Spans of the ranks and the queues of the first engines, in seconds."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.queues: list[list[tuple[float, int, int]]] = []
        """Time, running and waiting requests of each engine."""
        self.marks: list[tuple[float, str]] = []

    def add_span(self, name: str, begin_s: float, end_s: float) -> None:
        self.spans.append((name, begin_s, end_s))

    def new_queue(self) -> Callable[[float, int, int], None]:
        """Return what an engine calls with its requests; only the first engines are kept."""
        if len(self.queues) == SHOWN_ENGINES:
            return lambda now_s, running, waiting: None
        queue: list[tuple[float, int, int]] = []
        self.queues.append(queue)

        def note(now_s: float, running: int, waiting: int) -> None:
            if queue and now_s - queue[-1][0] < INTERVAL_S and running:
                return
            queue.append((now_s, running, waiting))

        return note

    def write_trace(self, path: Path) -> None:
        """Write the trace event format, which https://ui.perfetto.dev opens."""
        events: list[dict[str, object]] = [
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": begin_s * 1e6,
                "dur": (end_s - begin_s) * 1e6,
            }
            for name, begin_s, end_s in self.spans
        ]
        for k, queue in enumerate(self.queues):
            events += [
                {
                    "name": f"engine {k}",
                    "ph": "C",
                    "pid": 1,
                    "ts": at_s * 1e6,
                    "args": {"running": running, "waiting": waiting},
                }
                for at_s, running, waiting in queue
            ]
        events += [
            {"name": what, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at_s * 1e6}
            for at_s, what in self.marks
        ]
        names = {0: "ranks", 1: "engines"}
        events += [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
            for pid, name in names.items()
        ]
        write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def draw(self, path: Path, title: str) -> None:
        """Write a PNG: the ranks' work above, the engines' running requests below."""
        matplotlib.use("Agg")
        rows = max(len(self.queues), 1)
        figure = Figure(figsize=(12, 2.2 + 0.22 * rows), layout="constrained")
        ranks, engines = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1 + 0.25 * rows]}
        )
        kinds = dict.fromkeys(name for name, _, _ in self.spans)
        for kind in kinds:
            bars = [(begin, end - begin) for name, begin, end in self.spans if name == kind]
            ranks.broken_barh(bars, (0, 1), label=kind, facecolors=COLORS.get(kind, "#dd8452"))
        for at_s, _ in self.marks:
            ranks.axvline(at_s, color="#c44e52", linewidth=1)
        ranks.set_yticks([])
        ranks.set_title(title)
        ranks.legend(loc="upper right", fontsize="x-small", ncols=len(kinds) or 1)
        most = max((running for queue in self.queues for _, running, _ in queue), default=1) or 1
        for k, queue in enumerate(self.queues):
            times = [at_s for at_s, _, _ in queue]
            heights = [k + 0.9 * running / most for _, running, _ in queue]
            engines.fill_between(times, k, heights, step="post", color="#55a868")
        engines.set_ylabel(f"engines; full height: {most} requests", fontsize="small")
        engines.set_yticks([])
        engines.set_xlabel("seconds")
        figure.savefig(path, dpi=110)


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
    num_recoveries: int = 0
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
        self.num_recoveries += run.failures.num_recoveries
        self.num_samples_lost += run.num_samples_lost
        stored = sum(collector.store.most_tokens for collector in run.collectors)
        self.most_stored_tokens = max(self.most_stored_tokens, stored)


@dataclass(frozen=True)
class SimulationResult:
    """Outcome of a simulation: a summary, the metrics of each step, and what happened when."""

    summary: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, float]]
    timeline: Timeline


def simulate(
    config: Config, costs: RecipeCosts, engine_losses_s: Sequence[float] = ()
) -> SimulationResult:
    """Run simulate.steps steps. Raises RuntimeError if the run is lost too often to end.

    engine_losses_s   seconds from each start at which engines are lost, besides drawn failures
    """
    began = time.perf_counter()
    loop = VirtualLoop()
    clock = VirtualTime(loop)
    timeline = Timeline()
    clock.on_span = timeline.add_span
    log = StepLog()
    totals = _Totals()
    draw = random.Random(config.run.seed)
    num_tokens = prompt_len_of(config.simulate, config.data)
    prompts = SimulatedPrompts(num_tokens, config.simulate.prompts)
    make_stream = partial(ShuffledStream, prompts, config.run.seed, shuffle=False)
    try:
        with replace_clock(loop.time), tempfile.TemporaryDirectory() as folder:

            def start(step: int) -> SimulatedRun:
                run_folder = RunFolder(folder)
                return SimulatedRun(
                    *(config, costs, clock, draw, step, run_folder, engine_losses_s)
                )

            load_s = CheckpointCosts.predict(config, costs).load_s
            again = config.simulate, load_s
            stream = _run_to_end(start, make_stream, *again, loop, log, totals, timeline)
    finally:
        loop.close()
    wall_s = time.perf_counter() - began
    simulating_s = clock.in_loop_s - loop.cpu_s[CONTROLLER] + clock.predicting_s
    controller_s = wall_s - simulating_s
    num_gpus = RunSize.make(config, "train").num_gpus
    summary = _summarize(num_gpus, log, totals, loop.time(), controller_s)
    summary |= {
        "prompts_unaccounted": len(
            log.list_unaccounted(stream.state_dict(), config.rollout.samples_per_prompt)
        ),
        "real_seconds": wall_s,
        "events": loop.num_events,
    }
    return SimulationResult(summary, log.steps, timeline)


def _run_to_end(
    start: Callable[[int], SimulatedRun],
    make_stream: Callable[[], ShuffledStream[Prompt]],
    simulated: SimulateConfig,
    load_s: float,
    loop: VirtualLoop,
    log: StepLog,
    totals: _Totals,
    timeline: Timeline,
) -> ShuffledStream[Prompt]:
    """Start the run again after each loss; return the prompts' stream of the last start.

    load_s   seconds to read a checkpoint
    """
    saved: dict[str, Any] = {}
    for _ in range(MOST_STARTS):
        stream = make_stream()
        if saved:
            stream.load_state_dict(saved["prompts"])
        start_s = loop.time()
        run = start(saved.get("step", 0))
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
        loop.run_until_complete(asyncio.sleep(simulated.restart_s + load_s))
    raise RuntimeError(
        f"the run was lost {MOST_STARTS} times, last as {totals.losses[-1]}: raise"
        f" simulate.mtbf_hours={simulated.mtbf_hours:g}, or save more often by a smaller"
        " checkpoint.every_steps"
    )


def _summarize(
    num_gpus: int, log: StepLog, totals: _Totals, seconds: float, controller_s: float
) -> dict[str, Any]:
    # The first step of a run has no samples from before, and later ones do.
    later = [metrics for step, metrics in log.steps.items() if step > 1] or [log.steps[1]]
    num_steps = len(log.steps)

    def mean(name: str) -> float:
        return fmean(metrics.get(name, 0.0) for metrics in later)

    step_s = mean("time/step")
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
        "recoveries": totals.num_recoveries,
        "samples_lost": totals.num_samples_lost,
        "runs_lost": len(totals.losses),
        "controller_cpu_s_per_step": controller_s / num_steps,
        "controller_share": controller_s / num_steps / step_s,
    }
