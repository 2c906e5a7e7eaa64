"""Finds the best split of GPUs between training and sampling, by simulating those that fit."""

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.config import Config
from mcore_rl.config.tree import Settings, with_settings
from mcore_rl.planning.checks import check_engines, check_sizes
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.recipe_models import RecipeModels
from mcore_rl.planning.suggest import find_too_large
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.machine import ReachedShares
from mcore_rl.tools.simulate.simulate import simulate

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


def search(config: Config, models: RecipeModels, num_gpus: int) -> tuple[list[SimulatedSplit], int]:
    """Return the splits of `num_gpus` that fit, fastest first, and the number of those that don't.

    The trainer keeps its tensor, pipeline, context and expert parallelism and has as many replicas
    as a split says; engines take the remaining GPUs. On shared GPUs both have all of them. Raises
    ValueError if no split exists, or none fits.
    """
    found = []
    num_refused = 0
    for settings in _splits(config, num_gpus):
        try:
            changed = with_settings(config, settings)
            check_sizes(changed, models.policy)
            check_engines(changed, models.policy)
            if find_too_large(changed.plan, predict_memory(changed, models)):
                raise ValueError("it does not fit")
        except ValueError:
            num_refused += 1
            continue
        found.append(_simulated(changed, models, settings))
    if not found:
        raise ValueError(
            f"none of {num_refused} splits of {num_gpus} GPUs fits: give more GPUs, or change"
            " parallel.tp, pp, cp or ep (mcore-rl plan says what is too large)"
        )
    return sorted(found, key=lambda split: split.step_s), num_refused


def _splits(config: Config, num_gpus: int) -> Iterator[Settings]:
    """Yield the options of each split, whether it fits or not."""
    parallel = config.parallel
    replica = parallel.tp * parallel.pp * parallel.cp
    for width in WIDTHS:
        tp = int(config.rollout.tp * width)
        if tp < 1 or config.rollout.tp * width != tp:
            continue
        engine = {"rollout.tp": tp, "rollout.ep": tp if config.rollout.ep > 1 else 1}
        ranks = tp * config.rollout.pp
        for dp in range(1, num_gpus // replica + 1):
            trainer_gpus = replica * dp
            if config.cluster.colocated:
                if trainer_gpus == num_gpus and num_gpus % ranks == 0:
                    yield {**engine, "parallel.dp": dp, "rollout.engines": num_gpus // ranks}
            elif (num_gpus - trainer_gpus) % ranks == 0 and trainer_gpus < num_gpus:
                engines = (num_gpus - trainer_gpus) // ranks
                yield {**engine, "parallel.dp": dp, "rollout.engines": engines}


def _simulated(config: Config, models: RecipeModels, settings: Settings) -> SimulatedSplit:
    summary = simulate(config, RecipeCosts.of(config, models, ReachedShares())).summary
    return SimulatedSplit(
        settings,
        config.parallel.world_size,
        config.rollout.engines * config.rollout.engine_ranks,
        summary["step_s"],
        summary["trainer_busy"],
        summary["engines_busy"],
    )
