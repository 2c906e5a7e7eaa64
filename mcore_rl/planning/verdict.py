"""Judges whether the ranks of a recipe fit their GPUs, and names the nearest layout that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.checks.sizes import check_engines, check_sizes
from mcore_rl.config import Config, DataConfig, DriftConfig, EvalConfig, PlanConfig
from mcore_rl.config.recipe import require
from mcore_rl.config.tree import Settings, spell, with_settings
from mcore_rl.planning.bundles import COMMANDS, RunSize
from mcore_rl.planning.deployment import Deployment, make_deployment
from mcore_rl.planning.gpus import check_budget
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.peak_memory import RankMemory, Side
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import SyncMemory
from mcore_rl.planning.suggest import GIB, count_available, find_too_large, suggest_settings
from mcore_rl.planning.sync import PlanSummary, predict_sync
from mcore_rl.weights.plan.cost import Traffic


@dataclass(frozen=True)
class PlannedSync:
    """The traffic of a weight sync from the trainer's ranks to the engines'."""

    deployment: Deployment
    summary: PlanSummary
    traffic: Traffic

    @staticmethod
    def make(run: PlannedRun) -> "PlannedSync":
        """Plan who sends what to whom. Raises ValueError naming a slice that cannot be sent."""
        deployment = make_deployment(run)
        return PlannedSync(deployment, *predict_sync(run, deployment))


@dataclass(frozen=True)
class PlanVerdict:
    """Whether a recipe fits its GPUs, a sentence that says so, and what was computed for it.

    suggested   options of the nearest layout that fits; None: it fits as it is, or no layout does
    """

    fits: bool
    sentence: str
    run: PlannedRun
    ranks: Sequence[RankMemory]
    sync: PlannedSync
    suggested: Settings | None = None


def judge_recipe(config: Config) -> PlanVerdict:
    """Return the verdict on `mcore-rl train`.

    Raises ValueError naming an option that is missing, two sizes that do not divide, cluster.gpus
    if it is exceeded, or a rank's slice of a weight that cannot be sent.
    """
    require({"model.path": config.model.path})
    check_algorithm(config)
    check_budget(RunSize.make(config, "train"), config.cluster.gpus, config.parallel.dp)
    run = PlannedRun.make(config)
    check_planned_sizes(run, config.data, config.drift, config.eval)
    sync = PlannedSync.make(run)
    links = SyncMemory.count(run)
    ranks = predict_memory(run, sync=links)
    fits, sentence = judge(run.plan, ranks)
    if fits:
        return PlanVerdict(fits, sentence, run, ranks, sync)

    def replan(settings: Settings) -> PlannedRun:
        changed = with_settings(config, settings)
        size = RunSize.make(changed, "train")
        check_budget(size, changed.cluster.gpus, changed.parallel.dp)
        return PlannedRun.make(changed, run.models)

    longest_len = config.data.max_prompt_len + config.rollout.max_response_len
    suggested = suggest_settings(run, replan, longest_len, links)
    return PlanVerdict(fits, f"{sentence} {_advise(suggested)}", run, ranks, sync, suggested)


def check_planned_sizes(
    run: PlannedRun, data: DataConfig, drift: DriftConfig, evaluation: EvalConfig
) -> None:
    """Raise ValueError naming two sizes of a run that do not divide, or what engines cannot do."""
    policy, rollout = run.models.policy, run.rollout
    layout = run.parallel, run.critic, run.train
    check_sizes(policy, *layout, rollout, data, run.plan.ranks_per_host)
    check_engines(policy, run.dtype, rollout, drift, data, evaluation)


def refuse_too_large(config: Config, command: str) -> None:
    """Raise ValueError as `judge_recipe` does, and if ranks that `command` starts do not fit."""
    if command == "train":
        verdict = judge_recipe(config)
        fits, sentence = verdict.fits, verdict.sentence
    else:
        check_budget(RunSize.make(config, command), config.cluster.gpus, config.parallel.dp)
        run = PlannedRun.make(config)
        alone = replace(run, cluster=replace(run.cluster, colocated=False))
        side: Side = "trainer" if COMMANDS[command].trainer else "engine"
        fits, sentence = judge(run.plan, predict_memory(alone, side))
    if not fits:
        raise ValueError(f"plan.gpu_memory_gib={config.plan.gpu_memory_gib:g}: {sentence}")


def judge(plan: PlanConfig, ranks: Sequence[RankMemory]) -> tuple[bool, str]:
    """Return whether all ranks fit, and a sentence that says so or what is too large."""
    large = find_too_large(plan, ranks)
    if not large:
        fullest = max(ranks, key=lambda rank: rank.num_bytes / count_available(plan, rank))
        share = fullest.num_bytes / count_available(plan, fullest)
        return (
            True,
            f"fits: {fullest.who} are the fullest, {share:.0%} of what there is; most is"
            f" {fullest.largest}",
        )
    worst = max(large, key=lambda rank: rank.num_bytes - count_available(plan, rank))
    beyond = (worst.num_bytes - count_available(plan, worst)) / GIB
    return False, (
        f"does not fit: {worst.who} are {beyond:.1f} GiB beyond {plan.gpu_memory_gib:g} GiB"
        f" at their {worst.moment}; most is {worst.largest}, {worst.uses[worst.largest] / GIB:.1f}"
        " GiB."
    )


def _advise(settings: Settings | None) -> str:
    if settings is None:
        return "No layout on up to eight times as many GPUs fits."
    shown = (f"{key}={spell(value)}" for key, value in settings.items())
    return f"The nearest layout that fits: {' '.join(shown)}"
