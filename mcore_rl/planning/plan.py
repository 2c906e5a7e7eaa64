"""`mcore-rl plan`: prints whether a recipe fits, its GPUs, its layout, memory and batch.

With --detail, tables follow: the memory of ranks, and the traffic of a weight sync.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from mcore_rl.config import (
    Config,
    CriticConfig,
    DataConfig,
    ParallelConfig,
    PlanConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.config.run import RecoveryConfig
from mcore_rl.planning.adapter_memory import (
    explain_engines,
    explain_frozen,
    list_frozen_bytes,
    list_frozen_critic_bytes,
)
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.gpus import find_gpus
from mcore_rl.planning.host_memory import StoreMemory, explain_servers
from mcore_rl.planning.kept_state import explain_kept_states, predict_kept_states
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.peak_memory import RankMemory
from mcore_rl.planning.peak_memory import encode_ranks as memory_as_json
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.suggest import GIB, count_available
from mcore_rl.planning.sync import make_comparison_table, make_flows_table
from mcore_rl.planning.verdict import PlanVerdict, judge, judge_recipe
from mcore_rl.process.kept_memory import NUM_COPIES


def make_memory_table(plan: PlanConfig, ranks: Sequence[RankMemory]) -> Table:
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
        available = count_available(plan, rank) / GIB
        table.add_row(
            rank.who, rank.moment, shown, f"{rank.num_bytes / GIB:.1f}", f"{available:.1f}"
        )
    return table


def explain(run: PlannedRun, data: DataConfig, ranks: Sequence[RankMemory]) -> list[str]:
    """Three sentences with the recipe's arithmetic: layout, memory, batch."""
    return [
        _explain_layout(run.parallel, run.rollout, run.critic, run.cluster.colocated),
        _explain_memory(run.plan, ranks),
        _explain_batch(data, run.rollout, run.train, run.parallel.dp_size),
    ]


def _explain_layout(
    parallel: ParallelConfig, rollout: RolloutConfig, critic: CriticConfig | None, colocated: bool
) -> str:
    trainer = f"{parallel.world_size} trainer ranks ({_show_sizes(parallel)})"
    sizes = {"EP": rollout.ep, "PP": rollout.pp, "attention DP": rollout.attention_dp}
    shown = [f"TP {rollout.tp}", *(f"{name} {size}" for name, size in sizes.items() if size > 1)]
    engines = f"{rollout.engines} engines of {rollout.engine_ranks} ranks ({', '.join(shown)})"
    shared = " on the same GPUs" if colocated else ""
    beside = ""
    if critic is not None:
        where = " on the trainer's GPUs" if critic.colocated else ""
        ranks = critic.parallel.world_size
        beside = f", {ranks} critic ranks ({_show_sizes(critic.parallel)}){where}"
    return f"Layout: {trainer}{beside}, {engines}{shared}."


def _show_sizes(parallel: ParallelConfig) -> str:
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


def _explain_memory(plan: PlanConfig, ranks: Sequence[RankMemory]) -> str:
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


def _explain_batch(
    data: DataConfig, rollout: RolloutConfig, train: TrainConfig, dp_size: int
) -> str:
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


@dataclass(frozen=True)
class PlanOutput:
    """How a plan is printed, and with which lines besides its own.

    base_gpus   GPUs of the recipe that this one starts from, to compare with
    missing     inputs of `mcore-rl train` that are not here, each with its remedy
    """

    as_json: bool = False
    detail: bool = False
    base_gpus: int | None = None
    missing: Sequence[str] = ()


def print_plan(config: Config, shown: PlanOutput = PlanOutput()) -> bool:
    """Print the plan of a recipe and return whether it fits its GPUs.

    Raises ValueError as `judge_recipe` does.
    """
    verdict = judge_recipe(config)
    run = verdict.run
    gpus = find_gpus(
        RunSize.make(config, "train"),
        config.rollout,
        config.cluster,
        config.plan.ranks_per_host,
        shown.base_gpus,
    )
    explained = explain(run, config.data, verdict.ranks)
    stores = StoreMemory.make(run, config.data, config.algorithm, config.drift)
    servers = explain_servers(config.sandbox, config.search)
    kept = predict_kept_states(run, config.run.recovery)
    smallest = explain_smallest(run, config.run.recovery)
    if shown.as_json:
        memory = {
            "memory": memory_as_json(verdict.ranks),
            "fits": verdict.fits,
            "verdict": verdict.sentence,
            **asdict(gpus),
            "explained": explained,
            "store_bytes": stores.num_bytes,
            "store_nodes": stores.num_nodes,
            "frozen_bytes": list_frozen_bytes(run),
            "critic_frozen_bytes": list_frozen_critic_bytes(run),
            "servers": servers,
            "kept_states": [asdict(state) for state in kept],
            "smallest_layout": smallest,
            "missing": list(shown.missing),
        }
        print(json.dumps(asdict(verdict.sync.summary) | memory))
        return verdict.fits
    console = Console(width=None if sys.stdout.isatty() else 120)
    states = explain_kept_states(kept, config.plan.ranks_per_host)
    host = [stores.explain(), states, smallest, explain_frozen(run), explain_engines(run)]
    lines = [verdict.sentence, gpus.explain(), *explained, *host, servers]
    for line in filter(None, [*lines, *_explain_missing(shown.missing)]):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if shown.detail:
        for table in _make_tables(config.model.path, verdict):
            console.print(table)
    return verdict.fits


def _explain_missing(missing: Sequence[str]) -> list[str]:
    if not missing:
        return []
    return ["Here, `mcore-rl train` would refuse this:", *(f"  {line}" for line in missing)]


def _make_tables(model_path: str, verdict: PlanVerdict) -> list[Table]:
    """Return the memory of ranks, who sends what to whom in a weight sync, and its seconds."""
    sync = verdict.sync
    return [
        make_memory_table(verdict.run.plan, verdict.ranks),
        make_flows_table(model_path, sync.deployment, sync.traffic, sync.summary),
        make_comparison_table(sync.summary),
    ]


def explain_smallest(run: PlannedRun, recovery: RecoveryConfig) -> str:
    """Return a sentence on the ranks of the smallest layout; "" if the run may not become smaller.

    Their shares of the optimizer are larger, on the GPU and in the host memory of states.
    """
    if recovery.min_dp is None:
        return ""
    smallest = replace(run, parallel=_find_smallest(run.parallel, recovery.min_dp, "parallel"))
    if run.critic is not None:
        parallel = _find_smallest(run.critic.parallel, recovery.min_dp, "critic.parallel")
        smallest = replace(smallest, critic=replace(run.critic, parallel=parallel))
    _, sentence = judge(run.plan, predict_memory(smallest, "trainer"))
    kept = predict_kept_states(smallest, recovery)
    host = NUM_COPIES * max(state.rank_bytes for state in kept) / GIB
    return (
        f"With run.recovery.min_dp={recovery.min_dp}, a run that lost nodes may go on with"
        f" parallel.dp={smallest.parallel.dp_size}, each rank with {host:.1f} GiB of states in host"
        f" memory; this {sentence}"
    )


def _find_smallest(parallel: ParallelConfig, min_dp: int, group: str) -> ParallelConfig:
    """Return the layout of the smallest legal data-parallel size from `min_dp` on."""
    for dp in range(min_dp, parallel.dp_size):
        smaller = replace(parallel, dp=dp)
        try:
            smaller.check(group)
        except ValueError:
            continue
        return smaller
    return parallel
