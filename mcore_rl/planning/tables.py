"""Shows the memory of a recipe's ranks in tables and explains it in sentences."""

from collections.abc import Sequence

from rich.table import Table

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import (
    Config,
    CriticConfig,
    DataConfig,
    ParallelConfig,
    PlanConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.planning.moments import RecipeModels
from mcore_rl.planning.nearest import GIB, Settings, available_bytes, nearest_that_fits, too_large
from mcore_rl.planning.rank_memory import RankMemory


def memory_table(plan: PlanConfig, ranks: Sequence[RankMemory]) -> Table:
    """A table with a row for each kind of rank."""
    table = Table(
        title=f"memory of each rank of {plan.gpu_memory_gib:g} GiB, at its fullest moment",
        caption=f"GiB; besides, {plan.process_gib:g} for each process",
    )
    for column in ("ranks", "moment", "what takes it"):
        table.add_column(column)
    for column in ("in all", "of"):
        table.add_column(column, justify="right")
    for rank in ranks:
        uses = sorted(rank.uses.items(), key=lambda use: -use[1])
        shown = ", ".join(f"{what} {size / GIB:.1f}" for what, size in uses if size / GIB >= 0.05)
        available = available_bytes(plan, rank) / GIB
        table.add_row(
            rank.who, rank.moment, shown, f"{rank.num_bytes / GIB:.1f}", f"{available:.1f}"
        )
    return table


def verdict(config: Config, models: RecipeModels, ranks: Sequence[RankMemory]) -> tuple[bool, str]:
    """Return whether all ranks fit, and a sentence that says so or names what to change."""
    plan = config.plan
    large = too_large(plan, ranks)
    if not large:
        fullest = max(ranks, key=lambda rank: rank.num_bytes / available_bytes(plan, rank))
        share = fullest.num_bytes / available_bytes(plan, fullest)
        return (
            True,
            f"fits: {fullest.who} are the fullest, {share:.0%} of what there is; most is"
            f" {fullest.largest}",
        )
    worst = max(large, key=lambda rank: rank.num_bytes - available_bytes(plan, rank))
    beyond = (worst.num_bytes - available_bytes(plan, worst)) / GIB
    return False, (
        f"does not fit: {worst.who} are {beyond:.1f} GiB beyond {plan.gpu_memory_gib:g} GiB"
        f" at their {worst.moment}; most is {worst.largest}, {worst.uses[worst.largest] / GIB:.1f}"
        " GiB. " + _advice(nearest_that_fits(config, models))
    )


def _advice(settings: Settings | None) -> str:
    if settings is None:
        return "No layout on up to eight times as many GPUs fits."
    return "The nearest layout that fits: " + " ".join(
        f"{key}={'null' if value is None else str(value).lower()}"
        for key, value in settings.items()
    )


def explain(config: Config, ranks: Sequence[RankMemory]) -> list[str]:
    """Three sentences with the recipe's arithmetic: layout, memory, batch."""
    critic = config.critic if needs_of(config.algorithm).critic else None
    batch = _batch(config.data, config.rollout, config.train, config.parallel.dp_size)
    return [
        _layout(config.parallel, config.rollout, critic, config.cluster.colocated),
        _memory(config.plan, ranks),
        batch,
    ]


def _layout(
    parallel: ParallelConfig, rollout: RolloutConfig, critic: CriticConfig | None, colocated: bool
) -> str:
    trainer = f"{parallel.world_size} trainer ranks ({_sizes(parallel)})"
    sizes = {"EP": rollout.ep, "PP": rollout.pp, "attention DP": rollout.attention_dp}
    shown = [f"TP {rollout.tp}", *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
    engines = f"{rollout.engines} engines of {rollout.engine_ranks} ranks ({', '.join(shown)})"
    shared = " on the same GPUs" if colocated else ""
    beside = ""
    if critic is not None:
        where = " on the trainer's GPUs" if critic.colocated else ""
        ranks = critic.parallel.world_size
        beside = f", {ranks} critic ranks ({_sizes(critic.parallel)}){where}"
    return f"Layout: {trainer}{beside}, {engines}{shared}."


def _sizes(parallel: ParallelConfig) -> str:
    sizes = {
        "TP": parallel.tp,
        "PP": parallel.pp,
        "VPP": parallel.vpp or 1,
        "CP": parallel.cp,
        "DP": parallel.dp_size,
        "EP": parallel.ep,
        "ETP": parallel.etp,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one"


def _memory(plan: PlanConfig, ranks: Sequence[RankMemory]) -> str:
    fullest: dict[str, RankMemory] = {}
    for rank in ranks:
        if rank.side not in fullest or rank.num_bytes > fullest[rank.side].num_bytes:
            fullest[rank.side] = rank
    parts = []
    for rank in fullest.values():
        most = f"{rank.largest} {rank.uses[rank.largest] / GIB:.1f}"
        parts.append(f"{rank.who} {rank.num_bytes / GIB:.1f} GiB at their {rank.moment} ({most})")
    besides = f"{plan.process_gib:g} GiB for each process besides"
    return f"Memory, of {plan.gpu_memory_gib:g} GiB: {'; '.join(parts)}; {besides}."


def _batch(data: DataConfig, rollout: RolloutConfig, train: TrainConfig, dp_size: int) -> str:
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    num_steps = train.mini_batches * train.epochs
    longest = data.max_prompt_len + rollout.max_response_len
    return (
        f"Batch: {rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt} ="
        f" {num_samples:,} sequences of at most {data.max_prompt_len:,} +"
        f" {rollout.max_response_len:,} = {longest:,} tokens; {num_steps} optimizer"
        f" step{'s' * (num_steps > 1)} of {num_samples // train.mini_batches:,} sequences, in"
        f" micro-batches of at most {train.max_tokens_per_microbatch:,} tokens on"
        f" {dp_size} data-parallel rank{'s' * (dp_size > 1)}."
    )
