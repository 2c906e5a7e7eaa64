"""Says how much of a recipe's time steps take that need not be done again, for a rate of failures.

simulations without failures  -->  seconds of a step's parts         -+
one in which engines are lost -->  what the loss of an engine costs   +-> replays of many steps
bytes of states, speeds       -->  recoveries, saves, restarts       -+
"""

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mcore_rl import rollout
from mcore_rl.config import Config
from mcore_rl.planning.bundles import RunSize
from mcore_rl.process.disk import report_full_disk, write_whole
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.fault_replay import (
    HOUR_S,
    EffectiveTime,
    FaultCosts,
    StepCosts,
    find_interval_s,
    replay,
)
from mcore_rl.tools.simulate.recovery_costs import CheckpointCosts, RecoveryCosts
from mcore_rl.tools.simulate.simulate import SimulationResult, simulate

NUM_STEPS = 100_000
"""Steps of a replay."""


@dataclass(frozen=True)
class FaultReport:
    """The effective time of a recipe: what it follows from, and what it is in both ways.

    num_engines_lost   losses that engine_s is the mean of
    """

    gpus: int
    num_engines_lost: int
    costs: FaultCosts
    partner_memory: EffectiveTime
    restarts: EffectiveTime


def predict_effective_time(config: Config, costs: RecipeCosts) -> FaultReport:
    """Simulate a recipe's steps and replay failures; `config` as prediction.make_checked has it.

    Raises ValueError if no GPU fails, or if whole machines do.
    """
    _check(config)
    size = RunSize.make(config, "train")
    step, engine_s, num_engines_lost = _simulate_steps(config, costs)
    recovery = RecoveryCosts.predict(config, costs)
    checkpoints = CheckpointCosts.predict(config, costs)
    mtbf_s = config.simulate.mtbf_hours * HOUR_S
    rank_mtbf_s = mtbf_s / size.trainer_gpus
    save_every = config.checkpoint.every_steps or _choose_interval(
        step.step_s, checkpoints, rank_mtbf_s
    )
    faults = FaultCosts(
        step=step,
        recovery=recovery,
        checkpoints=checkpoints,
        restart_s=config.simulate.restart_s,
        engine_s=engine_s,
        rank_mtbf_s=rank_mtbf_s,
        engine_mtbf_s=mtbf_s / (config.rollout.engines * config.rollout.engine_ranks),
        save_every=save_every,
        most_recoveries=config.run.recovery.limit_restarts(size.trainer + size.critic),
    )
    seed = config.run.seed
    return FaultReport(
        size.num_gpus,
        num_engines_lost,
        faults,
        replay(faults, NUM_STEPS, seed, recovers=True),
        replay(faults, NUM_STEPS, seed, recovers=False),
    )


def _check(config: Config) -> None:
    simulated = config.simulate
    if not simulated.mtbf_hours:
        raise ValueError(
            "simulate.mtbf_hours=0: --effective needs the mean time between failures of a GPU"
        )
    if simulated.node_mtbf_hours:
        raise ValueError(
            f"simulate.node_mtbf_hours={simulated.node_mtbf_hours:g}: --effective draws failures of"
            " GPUs alone; set it to 0"
        )


def _choose_interval(step_s: float, checkpoints: CheckpointCosts, mtbf_s: float) -> int:
    """Return the best number of steps between checkpoints that can be written meanwhile."""
    best_s = find_interval_s(checkpoints.save_s, mtbf_s)
    return max(1, round(best_s / step_s), math.ceil(checkpoints.write_s / step_s))


def _simulate_steps(config: Config, costs: RecipeCosts) -> tuple[StepCosts, float, int]:
    """Return the seconds of a step's parts, and those that an engine's loss costs.

    The third value is the number of losses that were simulated.
    """
    without = replace(
        config,
        run=replace(config.run, recovery=replace(config.run.recovery, partner="none")),
        simulate=replace(config.simulate, mtbf_hours=0.0),
        checkpoint=replace(config.checkpoint, every_steps=0),
    )
    undisturbed = simulate(without, costs)
    ideal_s = _step_s(undisturbed)
    if config.simulate.slow_share or config.simulate.slow_ranks:
        even = replace(without.simulate, slow_share=0.0, slow_ranks=0.0)
        ideal_s = _step_s(simulate(replace(without, simulate=even), costs))
    step = _make_step(
        undisturbed,
        ideal_s,
        is_beside=config.rollout.mode != "sync",
        is_apart=RunSize.make(config, "train").tenants == 1,
    )
    seconds = undisturbed.summary["seconds"]
    spacing_s = max(step.step_s, 2 * config.simulate.engine_restart_s)
    first_s = undisturbed.steps[1]["time/step"]
    num_losses = max(1, int((seconds - first_s) / spacing_s))
    losses_s = [first_s + (k + 0.5) * (seconds - first_s) / num_losses for k in range(num_losses)]
    often = replace(without.rollout, restarts=num_losses)
    with _silence_lost_engines():
        disturbed = simulate(replace(without, rollout=often), costs, losses_s)
    num_lost = disturbed.summary["engines_lost"]
    extra_s = disturbed.summary["seconds"] - seconds
    return step, max(extra_s, 0.0) / num_lost, num_lost


@contextmanager
def _silence_lost_engines() -> Iterator[None]:
    """Have the log not name each request that is sent again, as engines are lost on purpose."""
    log = logging.getLogger(rollout.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _step_s(result: SimulationResult) -> float:
    return result.summary["step_s"]


def _make_step(
    result: SimulationResult, ideal_s: float, *, is_beside: bool, is_apart: bool
) -> StepCosts:
    phases = result.summary["phases_s"]
    step_s = _step_s(result)
    work_s, sync_s = phases["logprobs"] + phases["train"], phases["sync"]
    refill_s = max(result.steps[1]["time/step"] - step_s, 0.0)
    wait_s = step_s - work_s - sync_s
    return StepCosts(ideal_s, work_s, wait_s, sync_s, is_beside, refill_s, is_apart)


def print_effective_time(config: Config, costs: RecipeCosts, out: Path, *, as_json: bool) -> None:
    """Print the effective time in both ways, and write it to effective_time.json in `out`."""
    report = predict_effective_time(config, costs)
    content = json.dumps(asdict(report), indent=1)
    path = out / "effective_time.json"
    with report_full_disk(path):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    if as_json:
        print(json.dumps(asdict(report)))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_make_table(config, report))
    console.print(_explain(report), highlight=False)
    console.print(f"numbers: {path}", soft_wrap=True, highlight=False)


def _make_table(config: Config, report: FaultReport) -> Table:
    ways = (report.partner_memory, report.restarts)
    every = report.costs.save_every
    table = Table(
        title=f"{config.model.path}: {report.gpus} x {config.simulate.gpu}, which fail every"
        f" {config.simulate.mtbf_hours:g} h each",
        caption=f"{NUM_STEPS:,} steps, the same failures for both, a checkpoint every {every} steps"
        if every > 1
        else f"{NUM_STEPS:,} steps, the same failures for both, a checkpoint after each step",
    )
    table.add_column("")
    table.add_column("partner memory", justify="right")
    table.add_column("restarts", justify="right")
    rows = [
        ("effective time", [f"{way.effective:.4f} +- {way.error:.4f}" for way in ways]),
        *((f"lost to {what}", _format(ways, what)) for what in _list_causes(ways)),
        *((what, [f"{way.counts.get(what, 0):,}" for way in ways]) for what in COUNTS),
        ("hours", [f"{way.hours:,.0f}" for way in ways]),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    return table


LEAST_SHARE = 5e-5
"""Smaller shares of the time are not shown."""
COUNTS = ("ranks lost", "engines lost", "recoveries", "restarts")


def _list_causes(ways: tuple[EffectiveTime, ...]) -> list[str]:
    """Return what a visible share of the time was lost to, most of the first way's first."""
    causes = dict.fromkeys(
        what for way in ways for what, share in way.shares.items() if share >= LEAST_SHARE
    )
    shares: Mapping[str, float] = ways[0].shares
    return sorted(causes, key=lambda what: -shares.get(what, 0.0))


def _format(ways: tuple[EffectiveTime, ...], what: str) -> list[str]:
    return [f"{way.shares.get(what, 0.0):.2%}" for way in ways]


def _explain(report: FaultReport) -> str:
    costs = report.costs
    step, recovery, saves = costs.step, costs.recovery, costs.checkpoints
    restart_s = recovery.notice_s + costs.restart_s + saves.load_s + step.refill_s
    lines = [
        f"a step takes {step.step_s:.1f} s: work {step.work_s:.1f}, waits {step.wait_s:.1f}, sync"
        f" {step.sync_s:.1f}; its state is kept in {recovery.keep_s:.2f} s",
        f"a rank is lost every {costs.rank_mtbf_s / 60:.3g} min; a recovery takes"
        f" {recovery.recovery_s:.1f} s: to notice {recovery.notice_s:.1f}, to replace"
        f" {recovery.replace_s:.1f}, to load {recovery.load_s:.1f}",
        f"a restart takes {restart_s:.0f} s: to notice {recovery.notice_s:.1f}, to start"
        f" {costs.restart_s:.0f}, to load {saves.load_s:.1f}, to sample anew {step.refill_s:.0f};"
        f" a checkpoint {saves.save_s:.2f} s, and {saves.write_s:.1f} s beside the steps",
        f"an engine is lost every {costs.engine_mtbf_s / 60:.3g} min, which delays the run by"
        f" {costs.engine_s:.1f} s (mean of {report.num_engines_lost})",
    ]
    for name, way in (("partner memory", report.partner_memory), ("restarts", report.restarts)):
        if way.no_step:
            lines.append(f"with {name}, {way.no_step}: raise simulate.mtbf_hours")
    return "\n".join(lines)
