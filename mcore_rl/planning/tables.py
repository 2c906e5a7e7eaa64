"""The memory of a recipe's ranks, as a table and in words."""

from collections.abc import Sequence

from rich.table import Table

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config, ParallelConfig
from mcore_rl.planning.models import RecipeModels
from mcore_rl.planning.nearest import GIB, Settings, available_bytes, nearest_that_fits, too_large
from mcore_rl.planning.rank_memory import RankMemory


def memory_table(config: Config, ranks: Sequence[RankMemory]) -> Table:
    """A row for each kind of rank; equal neighbours share one."""
    table = Table(
        title=f"memory of each rank of {config.plan.gpu_memory_gib:g} GiB, at its fullest moment",
        caption=f"GiB; besides, {config.plan.process_gib:g} for each process",
    )
    for column in ("ranks", "moment", "what takes it"):
        table.add_column(column)
    for column in ("in all", "of"):
        table.add_column(column, justify="right")
    for rank in ranks:
        uses = sorted(rank.uses.items(), key=lambda use: -use[1])
        shown = ", ".join(f"{what} {size / GIB:.1f}" for what, size in uses if size / GIB >= 0.05)
        available = available_bytes(config, rank) / GIB
        table.add_row(
            rank.who, rank.moment, shown, f"{rank.num_bytes / GIB:.1f}", f"{available:.1f}"
        )
    return table


def verdict(config: Config, models: RecipeModels, ranks: Sequence[RankMemory]) -> tuple[bool, str]:
    """Whether all ranks fit, and the sentence that says so, with what to change if they do not."""
    large = too_large(config, ranks)
    if not large:
        fullest = max(ranks, key=lambda rank: rank.num_bytes / available_bytes(config, rank))
        share = fullest.num_bytes / available_bytes(config, fullest)
        return (
            True,
            f"fits: {fullest.who} are the fullest, {share:.0%} of what there is; most is {fullest.largest}",
        )
    worst = max(large, key=lambda rank: rank.num_bytes - available_bytes(config, rank))
    beyond = (worst.num_bytes - available_bytes(config, worst)) / GIB
    return False, (
        f"does not fit: {worst.who} are {beyond:.1f} GiB beyond {config.plan.gpu_memory_gib:g} GiB at their"
        f" {worst.moment}; most is {worst.largest}, {worst.uses[worst.largest] / GIB:.1f} GiB. "
        + _advice(nearest_that_fits(config, models))
    )


def _advice(settings: Settings | None) -> str:
    if settings is None:
        return "No layout on up to eight times as many GPUs fits."
    return "The nearest layout that fits: " + " ".join(
        f"{key}={'null' if value is None else str(value).lower()}"
        for key, value in settings.items()
    )


def explain(config: Config, ranks: Sequence[RankMemory]) -> list[str]:
    """The recipe's arithmetic in sentences: layout, memory, batch."""
    return [_layout(config), _memory(config, ranks), _batch(config)]


def _layout(config: Config) -> str:
    rollout = config.rollout
    trainer = f"{config.parallel.world_size} trainer ranks ({_sizes(config.parallel)})"
    sizes = {"EP": rollout.ep, "PP": rollout.pp, "attention DP": rollout.attention_dp}
    shown = [f"TP {rollout.tp}", *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
    engines = f"{rollout.engines} engines of {rollout.engine_ranks} ranks ({', '.join(shown)})"
    shared = " on the same GPUs" if config.cluster.colocated else ""
    critic = ""
    if needs_of(config.algorithm).critic:
        where = " on the trainer's GPUs" if config.critic.colocated else ""
        ranks = config.critic.parallel.world_size
        critic = f", {ranks} critic ranks ({_sizes(config.critic.parallel)}){where}"
    return f"Layout: {trainer}{critic}, {engines}{shared}."


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


def _memory(config: Config, ranks: Sequence[RankMemory]) -> str:
    fullest = {
        rank.side: max((r for r in ranks if r.side == rank.side), key=lambda r: r.num_bytes)
        for rank in ranks
    }
    parts = []
    for rank in fullest.values():
        most = f"{rank.largest} {rank.uses[rank.largest] / GIB:.1f}"
        parts.append(f"{rank.who} {rank.num_bytes / GIB:.1f} GiB at their {rank.moment} ({most})")
    besides = f"{config.plan.process_gib:g} GiB for each process besides"
    return f"Memory, of {config.plan.gpu_memory_gib:g} GiB: {'; '.join(parts)}; {besides}."


def _batch(config: Config) -> str:
    rollout, train = config.rollout, config.train
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    num_steps = train.mini_batches * train.epochs
    longest = config.data.max_prompt_len + rollout.max_response_len
    return (
        f"Batch: {rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt} = {num_samples:,}"
        f" sequences of at most {config.data.max_prompt_len:,} + {rollout.max_response_len:,} ="
        f" {longest:,} tokens; {num_steps} optimizer step{'s' * (num_steps > 1)} of"
        f" {num_samples // train.mini_batches:,} sequences, in micro-batches of at most"
        f" {train.max_tokens_per_microbatch:,} tokens on {config.parallel.dp_size} data-parallel"
        f" rank{'s' * (config.parallel.dp_size > 1)}."
    )
