"""Predicts the steps of a recipe, draws them, and searches the best split.

The search simulates the splits of GPUs between training and sampling that fit.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config import Config, ParallelConfig, RolloutConfig
from mcore_rl.config.recipe import require
from mcore_rl.config.tree import Settings, with_settings
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.suggest import find_too_large
from mcore_rl.planning.verdict import check_planned_sizes
from mcore_rl.process.disk import report_full_disk, write_whole
from mcore_rl.tools.simulate.calibration import Calibration
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.effective_time import print_effective_time
from mcore_rl.tools.simulate.simulate import SimulationResult, simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares
from mcore_rl.tools.simulate.workload import prompt_len_of

WIDTHS = (0.5, 1, 2)
"""Ranks of an engine that are tried, relative to the recipe's."""


@dataclass(frozen=True)
class SimulatedSplit:
    """A split that fits; `settings` are the options that differ from the recipe."""

    settings: Settings
    num_trainer_gpus: int
    num_engine_gpus: int
    step_s: float
    trainer_busy: float
    engines_busy: float


def search(config: Config, num_gpus: int) -> tuple[list[SimulatedSplit], int]:
    """Return the splits of `num_gpus` that fit, fastest first, and the number of those that don't.

    The trainer keeps its tensor, pipeline, context and expert parallelism and has as many replicas
    as a split says; engines take the remaining GPUs. On shared GPUs both have all of them. Raises
    ValueError if no split exists, or none fits.
    """
    models = PlannedRun.make(config).models
    found = []
    num_refused = 0
    for settings in _list_splits(
        config.parallel, config.rollout, config.cluster.colocated, num_gpus
    ):
        try:
            changed = with_settings(config, settings)
            run = PlannedRun.make(changed, models)
            check_planned_sizes(run, changed.data, changed.drift, changed.eval)
            if find_too_large(changed.plan, predict_memory(run)):
                raise ValueError("it does not fit")
        except ValueError:
            num_refused += 1
            continue
        costs = RecipeCosts.make(changed, ReachedShares(), models)
        summary = simulate(changed, costs).summary
        found.append(_make_split(settings, changed.parallel, changed.rollout, summary))
    if not found:
        raise ValueError(
            f"none of {num_refused} splits of {num_gpus} GPUs fits: give more GPUs, or change"
            " parallel.tp, pp, cp or ep (mcore-rl plan says what is too large)"
        )
    return sorted(found, key=lambda split: split.step_s), num_refused


def _list_splits(
    parallel: ParallelConfig, rollout: RolloutConfig, colocated: bool, num_gpus: int
) -> Iterator[Settings]:
    """Yield the options of each split, whether it fits or not."""
    replica = parallel.tp * parallel.pp * parallel.cp
    for width in WIDTHS:
        tp = int(rollout.tp * width)
        if tp < 1 or rollout.tp * width != tp:
            continue
        engine = {"rollout.tp": tp, "rollout.ep": tp if rollout.ep > 1 else 1}
        ranks = tp * rollout.pp
        for dp in range(1, num_gpus // replica + 1):
            trainer_gpus = replica * dp
            if colocated:
                if trainer_gpus == num_gpus and num_gpus % ranks == 0:
                    yield {**engine, "parallel.dp": dp, "rollout.engines": num_gpus // ranks}
            elif (num_gpus - trainer_gpus) % ranks == 0 and trainer_gpus < num_gpus:
                engines = (num_gpus - trainer_gpus) // ranks
                yield {**engine, "parallel.dp": dp, "rollout.engines": engines}


def _make_split(
    settings: Settings,
    parallel: ParallelConfig,
    rollout: RolloutConfig,
    summary: Mapping[str, Any],
) -> SimulatedSplit:
    return SimulatedSplit(
        settings,
        parallel.world_size,
        rollout.engines * rollout.engine_ranks,
        summary["step_s"],
        summary["trainer_busy"],
        summary["engines_busy"],
    )


SHOWN_SPLITS = 12


def print_simulation(
    config: Config,
    out: Path | None,
    *,
    as_json: bool,
    search_gpus: int | None = None,
    is_effective: bool = False,
) -> None:
    """Simulate a recipe and write its picture, trace and numbers to `out`, or <run.dir>/simulation.

    With `search_gpus`, print how fast the splits of so many GPUs are instead; 0: the recipe's own.
    With `is_effective`, print how much of the time is effective under failures.

    Raises ValueError naming an option that is missing, or two that contradict one another.
    """
    config = make_checked(config)
    if search_gpus is not None:
        own_gpus = RunSize.make(config, "train").num_gpus
        num_gpus = search_gpus or own_gpus
        splits, num_refused = search(config, num_gpus)
        if as_json:
            print(json.dumps([asdict(split) for split in splits]))
            return
        title = f"{config.model.path}: splits of {num_gpus} x {config.simulate.gpu}, fastest first"
        _print_splits(splits, title, num_refused)
        return
    costs = RecipeCosts.make(config, ReachedShares())
    if run_dir := config.simulate.calibration:
        calibration = Calibration.measure(Path(run_dir), config.plan, config.simulate)
        simulated, costs = calibration.apply(config.simulate, costs)
        config = replace(config, simulate=simulated)
    folder = out or Path(config.run.dir) / "simulation"
    if is_effective:
        print_effective_time(config, costs, folder, as_json=as_json)
        return
    result = simulate(config, costs)
    title = (
        f"{Path(config.model.path).name}, {result.summary['gpus']} x {config.simulate.gpu},"
        f" {config.rollout.mode}: {result.summary['step_s']:.1f} s a step"
    )
    write(result, title, folder)
    if as_json:
        print(json.dumps(result.summary))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(result.summary, config.model.path, config.simulate.gpu))
    console.print(f"picture, trace and numbers: {folder}", soft_wrap=True, highlight=False)


def _print_splits(splits: Sequence[SimulatedSplit], title: str, num_refused: int) -> None:
    table = Table(
        title=title,
        caption=f"{num_refused} splits do not fit, or sizes do not divide",
    )
    table.add_column("seconds of a step", justify="right")
    for column in ("trainer", "engines"):
        table.add_column(f"GPUs of {column}", justify="right")
        table.add_column("they work", justify="right")
    table.add_column("settings")
    for split in splits[:SHOWN_SPLITS]:
        table.add_row(
            f"{split.step_s:.1f}",
            str(split.num_trainer_gpus),
            f"{split.trainer_busy:.0%}",
            str(split.num_engine_gpus),
            f"{split.engines_busy:.0%}",
            " ".join(f"{name}={value}" for name, value in split.settings.items()),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def make_checked(config: Config) -> Config:
    """Return the configuration with the steps that are simulated, and without evaluations.

    Raises ValueError as `mcore-rl plan` does, or if prompts are longer than allowed.
    """
    require({"model.path": config.model.path})
    check_algorithm(config)
    run = PlannedRun.make(config)
    check_planned_sizes(run, config.data, config.drift, config.eval)
    policy = run.models.policy
    simulated = config.simulate
    longest = config.data.max_prompt_len
    if simulated.prompt_len > longest:
        raise ValueError(
            f"simulate.prompt_len={simulated.prompt_len} exceeds data.max_prompt_len={longest}:"
            " lower the former, or raise the latter"
        )
    image_tokens = simulated.image_tokens
    if image_tokens and not policy.has_tower:
        raise ValueError(
            f"simulate.image_tokens={image_tokens}: model.path={config.model.path} sees text alone;"
            " set simulate.image_tokens=0"
        )
    prompt_len = prompt_len_of(simulated, config.data)
    if image_tokens > prompt_len:
        raise ValueError(
            f"simulate.image_tokens={image_tokens} exceeds the {prompt_len} tokens of a"
            " prompt: raise simulate.prompt_len"
        )
    if config.teacher.path:
        raise ValueError(
            f"teacher.path={config.teacher.path}: a teacher's time is not simulated; set"
            " teacher.path='' and an advantage without one"
        )
    run = replace(config.run, steps=simulated.steps)
    return replace(config, run=run, eval=replace(config.eval, data=[], every_steps=0))


def write(result: SimulationResult, title: str, folder: Path) -> None:
    """Write timeline.png, trace.json (for ui.perfetto.dev) and result.json."""
    picture = folder / "timeline.png"
    with report_full_disk(picture):
        folder.mkdir(parents=True, exist_ok=True)
        result.timeline.draw(picture, title)
    result.timeline.write_trace(folder / "trace.json")
    numbers = {"summary": result.summary, "steps": result.steps}
    write_whole(folder / "result.json", json.dumps(numbers, indent=1))


def _table(summary: Mapping[str, Any], model_path: str, gpu: str) -> Table:
    table = Table(
        title=f"{model_path}: {summary['gpus']} x {gpu}, {summary['steps']} steps simulated in"
        f" {summary['real_seconds']:.1f} s",
        caption="means of all steps but the first",
    )
    table.add_column("")
    table.add_column("", justify="right")
    tokens = summary["response_tokens_per_second_per_gpu"]
    phases = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in summary["phases_s"].items() if seconds >= 0.05
    )
    rows = {
        "seconds of a step": f"{summary['step_s']:.1f}",
        "its phases": phases,
        "response tokens per second and GPU": f"{tokens:.0f}",
        "trainer ranks work": f"{summary['trainer_busy']:.0%} of the time",
        "engines work": f"{summary['engines_busy']:.0%} of the time",
        "requests in a working engine": f"{summary['running_per_engine']:.0f}",
        "requests sent back as the KV cache was full": f"{summary['retracted']}",
        "versions that samples lag behind": f"{summary['staleness_mean']:.2f}",
        "seconds of a weight sync": f"{summary['sync_s']:.2f}",
        "machines lost": f"{summary['nodes_lost']} of {summary['nodes']}",
        "ranks recovered from memory": f"{summary['recoveries']}",
        "engines lost": f"{summary['engines_lost']}",
        "times the run was lost": f"{summary['runs_lost']}",
        "the controller's own seconds per step": f"{summary['controller_cpu_s_per_step']:.2f}"
        f" ({summary['controller_share']:.2%})",
        "prompts unaccounted for": f"{summary['prompts_unaccounted']}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
