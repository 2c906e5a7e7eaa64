"""Predicts the bytes and seconds of a weight sync, as numbers and as tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from mcore_rl.planning.deployment import Deployment, count_engine_links
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import count_sync_buffers
from mcore_rl.weights.plan.cost import (
    GATHER_BUCKET_BYTES,
    GatherBroadcast,
    Traffic,
    by_host,
    count_exchanged_bytes,
    predict,
    predict_gather_broadcast,
)
from mcore_rl.weights.plan.local import Flow, plan_recvs, plan_sends

GIB = 2**30


@dataclass(frozen=True)
class PlanSummary:
    """Bytes and seconds of one weight sync, per rank where the name says so.

    `seconds` is the longer of two overlapping times: that of the busiest link at `link_gbps`, and
    that of the rank which copies most from or to other ranks of its host, at `memory_gbps`. The
    seconds of the lower bound and of gather and broadcast count links alone.
    direct_*: with sync.relay=false, where trainer ranks send every engine rank all that it wants.
    *_kept_bytes: host memory for differences (sync.delta=always), per host: what the trainer's, or
    the engines', ranks there have sent and received over the network.
    """

    trainer_ranks: int
    engine_ranks: int
    model_bytes: int
    link_gbps: float
    memory_gbps: float
    network_bytes: int
    trainer_out_per_rank: tuple[int, int]
    engine_in_per_rank: tuple[int, int]
    relay_out_per_rank: tuple[int, int]
    engine_local_in_per_rank: tuple[int, int]
    trainer_out_per_host: tuple[int, int]
    engine_in_per_host: tuple[int, int]
    busiest_link_bytes: int
    busiest_copy_bytes: int
    lower_bound_bytes: int
    trainer_buffer_bytes: int
    engine_buffer_bytes: int
    engine_staged_bytes: int
    trainer_kept_bytes: int
    engine_kept_bytes: int
    seconds: float
    lower_bound_seconds: float
    direct_network_bytes: int
    direct_trainer_out_per_rank: tuple[int, int]
    direct_engine_in_per_rank: tuple[int, int]
    direct_busiest_link_bytes: int
    direct_busiest_copy_bytes: int
    direct_seconds: float
    gather_broadcast_in_per_rank: int
    gather_broadcast_network_bytes: int
    gather_broadcast_buffer_bytes: int
    gather_broadcast_seconds: float


def predict_sync(run: PlannedRun, deployment: Deployment) -> tuple[PlanSummary, Traffic]:
    """The sync's summary, and who sends how much to whom."""
    sides = deployment.source, deployment.target, deployment.hosts
    direct = predict(*sides)
    traffic = direct
    if deployment.relays:
        traffic = predict(*sides, engine_ranks=deployment.engine_ranks)
    rival = predict_gather_broadcast(*sides, deployment.stage_ranks)
    return _summarize(run, deployment, traffic, direct, rival), traffic


def find_busiest_copy(traffic: Traffic) -> int:
    """Most bytes that one rank reads from, or writes for, other ranks of its host."""
    return max((*traffic.trainer.local_out, *traffic.engines.local_in, *traffic.engines.local_out))


def predict_seconds(traffic: Traffic, link_gbps: float, memory_gbps: float) -> float:
    """Time of the busiest link or of the busiest rank's copies, whichever is longer."""
    return max(traffic.seconds(link_gbps), find_busiest_copy(traffic) * 8 / (memory_gbps * 1e9))


def _summarize(
    run: PlannedRun,
    deployment: Deployment,
    traffic: Traffic,
    direct: Traffic,
    rival: GatherBroadcast,
) -> PlanSummary:
    hosts = deployment.hosts
    link_gbps, memory_gbps = run.plan.link_gbps, run.plan.memory_gbps
    links = count_engine_links(run.rollout.engines, deployment.relays)
    buffers = _count_buffers(deployment, count_sync_buffers(run.sync), links)
    trainer_out = by_host(traffic.trainer.network_out, hosts.source_host)
    engine_in = by_host(traffic.engines.network_in, hosts.target_host)
    kept = count_exchanged_bytes(traffic, hosts) if run.sync.delta == "always" else (0, 0)
    return PlanSummary(
        trainer_ranks=deployment.source.num_ranks,
        engine_ranks=deployment.target.num_ranks,
        model_bytes=rival.model_bytes,
        link_gbps=link_gbps,
        memory_gbps=memory_gbps,
        network_bytes=traffic.network_bytes,
        trainer_out_per_rank=_find_range(traffic.trainer.network_out),
        engine_in_per_rank=_find_range(traffic.engines.network_in),
        relay_out_per_rank=_find_range(traffic.engines.network_out),
        engine_local_in_per_rank=_find_range(traffic.engines.local_in),
        trainer_out_per_host=_find_range(trainer_out.values()),
        engine_in_per_host=_find_range(engine_in.values()),
        busiest_link_bytes=traffic.busiest_link,
        busiest_copy_bytes=find_busiest_copy(traffic),
        lower_bound_bytes=traffic.lower_bound,
        trainer_buffer_bytes=max(buffers[0]),
        engine_buffer_bytes=max(buffers[1]),
        engine_staged_bytes=max(_count_into_engines(traffic)) if run.rollout.stage_weights else 0,
        trainer_kept_bytes=kept[0],
        engine_kept_bytes=kept[1],
        seconds=predict_seconds(traffic, link_gbps, memory_gbps),
        lower_bound_seconds=traffic.lower_bound * 8 / (link_gbps * 1e9),
        direct_network_bytes=direct.network_bytes,
        direct_trainer_out_per_rank=_find_range(direct.trainer.network_out),
        direct_engine_in_per_rank=_find_range(direct.engines.network_in),
        direct_busiest_link_bytes=direct.busiest_link,
        direct_busiest_copy_bytes=find_busiest_copy(direct),
        direct_seconds=predict_seconds(direct, link_gbps, memory_gbps),
        gather_broadcast_in_per_rank=rival.model_bytes,
        gather_broadcast_network_bytes=rival.network_bytes,
        gather_broadcast_buffer_bytes=GATHER_BUCKET_BYTES,
        gather_broadcast_seconds=rival.seconds(link_gbps),
    )


def _count_buffers(
    deployment: Deployment, link_bytes: int, num_links: int
) -> tuple[list[int], list[int]]:
    """Return the buffers' bytes on a few ranks of trainer and engines: at most `link_bytes` a link.

    A trainer rank has a link to each engine, an engine rank has `num_links`.
    """
    source, target, hosts = deployment.source, deployment.target, deployment.hosts
    num_engines = target.num_ranks // deployment.engine_ranks

    def count(flows: Iterable[Flow]) -> int:
        return min(sum(flow.num_bytes for flow in flows), link_bytes)

    trainers = [
        num_engines * count(plan_sends(rank, source, target, hosts))
        for rank in range(0, source.num_ranks, deployment.stage_ranks)
    ]
    ends = {0, target.num_ranks - 1}
    return trainers, [num_links * count(plan_recvs(rank, source, target, hosts)) for rank in ends]


def _count_into_engines(traffic: Traffic) -> list[int]:
    """Bytes that each engine rank takes in."""
    sides = zip(traffic.engines.network_in, traffic.engines.local_in, strict=True)
    return [network + local for network, local in sides]


def make_flows_table(
    model_path: str, deployment: Deployment, traffic: Traffic, summary: PlanSummary
) -> Table:
    """Who sends what to whom: rows for each pipeline stage, and for what the engines pass on."""
    table = Table(
        title=f"{model_path}: {summary.model_bytes / GIB:.1f} GiB,"
        f" {summary.trainer_ranks} trainer ranks to {summary.engine_ranks} engine ranks",
        caption="GiB of one weight sync",
    )
    for column in ("from", "what", "to"):
        table.add_column(column)
    for column in ("in all", "per rank"):
        table.add_column(column, justify="right")
    num_engines = summary.engine_ranks // deployment.engine_ranks
    engines = f"{num_engines} engine{'s' * (num_engines > 1)}"
    stage_ranks = deployment.stage_ranks
    for first in range(0, summary.trainer_ranks, stage_ranks):
        ranks = slice(first, first + stage_ranks)
        what = ", ".join(
            _show_layers(layers) for layers in deployment.trained.stage_layers(first // stage_ranks)
        )
        for counts, to in (
            (traffic.trainer.network_out, engines),
            (traffic.trainer.local_out, f"{engines}, same host"),
        ):
            _add_row(
                table, f"trainer ranks {first}-{first + stage_ranks - 1}", what, to, counts[ranks]
            )
    _add_row(table, "engine ranks", "what they get", "the next engine", traffic.engines.network_out)
    _add_row(
        table,
        "engine ranks",
        "what they get",
        "the next engine, same host",
        traffic.engines.local_out,
    )
    return table


def _add_row(table: Table, sender: str, what: str, to: str, counts: Sequence[int]) -> None:
    if any(counts):
        table.add_row(
            sender, what, to, f"{sum(counts) / GIB:.2f}", _show_range(_find_range(counts))
        )


def _convert_to_gib(summary: PlanSummary) -> dict[str, str]:
    """Return the byte counts of `summary` in GiB, by name."""
    return {
        name: f"{value / GIB:.2f}"
        for name, value in asdict(summary).items()
        if isinstance(value, int)
    }


def _make_empty_comparison(summary: PlanSummary, gib: Mapping[str, str]) -> Table:
    """Return the table with its title, caption and columns, without rows."""
    staged = f" and {gib['engine_staged_bytes']} staged" if summary.engine_staged_bytes else ""
    buffers = f"{gib['trainer_buffer_bytes']}, engine {gib['engine_buffer_bytes']}{staged}"
    if summary.trainer_kept_bytes or summary.engine_kept_bytes:
        kept = f"trainer {gib['trainer_kept_bytes']}, engine {gib['engine_kept_bytes']}"
        buffers += f"; kept in a host's memory for differences: {kept}"
    table = Table(
        title=f"one weight sync at {summary.link_gbps:g} Gbit/s per link and"
        f" {summary.memory_gbps:g} Gbit/s within a host",
        caption=f"GiB; seconds of the slices: links and copies overlap, the others count links"
        f" alone; buffers of a rank: trainer {buffers}; gather and broadcast"
        f" {gib['gather_broadcast_buffer_bytes']}",
    )
    table.add_column("")
    for column in ("slices, as set", "slices, direct", "lower bound", "gather and broadcast"):
        table.add_column(column, justify="right")
    return table


def make_comparison_table(summary: PlanSummary) -> Table:
    """Compare the sync, as set and without relay, with its lower bound and with gather and
    broadcast.
    """
    gib = _convert_to_gib(summary)
    table = _make_empty_comparison(summary, gib)
    table.add_row(
        "out of a trainer rank",
        _show_range(summary.trainer_out_per_rank),
        _show_range(summary.direct_trainer_out_per_rank),
    )
    table.add_row(
        "into an engine rank",
        _show_range(summary.engine_in_per_rank),
        _show_range(summary.direct_engine_in_per_rank),
        "",
        gib["gather_broadcast_in_per_rank"],
    )
    table.add_row(
        "network in all",
        gib["network_bytes"],
        gib["direct_network_bytes"],
        "",
        gib["gather_broadcast_network_bytes"],
    )
    table.add_row(
        "busiest link",
        gib["busiest_link_bytes"],
        gib["direct_busiest_link_bytes"],
        gib["lower_bound_bytes"],
    )
    table.add_row(
        "most copied within a host by a rank",
        gib["busiest_copy_bytes"],
        gib["direct_busiest_copy_bytes"],
    )
    seconds = (
        summary.seconds,
        summary.direct_seconds,
        summary.lower_bound_seconds,
        summary.gather_broadcast_seconds,
    )
    table.add_row("seconds", *(f"{value:.3f}" for value in seconds))
    return table


def _show_layers(layers: range) -> str:
    return f"layers {layers.start}-{layers.stop - 1}"


def _find_range(counts: Iterable[int]) -> tuple[int, int]:
    listed = list(counts)
    return min(listed), max(listed)


def _show_range(counts: tuple[int, int]) -> str:
    low, high = (f"{count / GIB:.2f}" for count in counts)
    return low if low == high else f"{low} - {high}"
