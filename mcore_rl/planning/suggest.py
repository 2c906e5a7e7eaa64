"""Finds overrides that make a recipe fit its GPUs' memory and change it least."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import ceil, log2
from typing import Any

from mcore_rl.config import ParallelConfig, PlanConfig
from mcore_rl.config.tree import Settings, value_of
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.peak_memory import RankMemory, Side
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import SyncMemory
from mcore_rl.weights.hf.config import linear_layers

GIB = 2**30
GROWTH = (1, 2, 4, 8)
"""Multiples of the recipe's GPUs that are tried, in this order."""
FARTHEST = 3.0
"""Largest distance from the recipe that is tried, in doublings, halvings and steps of recompute."""
SMALLER_BATCH = 0.5
"""Distance of half a micro-batch, or half the requests at once, which change the speed alone."""


def list_recomputes(now: str) -> tuple[str, str, str]:
    """Return values of train.recompute from the fastest to the smallest, the recipe's own among
    them.
    """
    return ("none", "selective" if now in ("none", "full") else now, "full")


def count_available(plan: PlanConfig, rank: RankMemory) -> float:
    """Bytes that a GPU has for the tensors of such ranks, after what its processes take."""
    return (plan.gpu_memory_gib - rank.num_processes * plan.process_gib) * GIB


def find_too_large(plan: PlanConfig, ranks: Sequence[RankMemory]) -> list[RankMemory]:
    return [rank for rank in ranks if rank.num_bytes > count_available(plan, rank)]


Replan = Callable[[Settings], PlannedRun]
"""Plans a recipe with other settings. Raises ValueError if sizes do not divide, or if the run takes
more than cluster.gpus."""


def suggest_settings(
    run: PlannedRun, replan: Replan, longest_len: int, sync: SyncMemory
) -> Settings | None:
    """Options to change so that the recipe, planned as `run`, fits; None if nothing does.

    longest_len   tokens of the longest sequence, which a micro-batch has to hold
    sync          what links of the recipe take; those of other layouts take about as much

    Each side keeps its number of GPUs if one of its layouts fits on them, otherwise it takes the
    smallest multiple with one that does. The nearest layout has the fewest doublings and halvings.
    """
    settings: dict[str, Any] = {}
    large = find_too_large(run.plan, predict_memory(run, sync=sync))
    parts = set()
    while large:
        part = large[0].side, _is_engines(large[0])
        if part in parts:
            return None
        parts.add(part)
        for candidate in _list_candidates(run, *part, longest_len):
            changes = {**settings, **_select_changes(run, candidate)}
            try:
                planned = replan(changes)
                left = _find_left(planned, part, sync) or _find_left(planned, part)
            except ValueError:
                continue
            if not left:
                settings = changes
                large = find_too_large(run.plan, predict_memory(planned))
                break
        else:
            return None
    return settings


def _is_engines(rank: RankMemory) -> bool:
    """Return whether an engine takes most of ranks, on GPUs that it may share with the trainer."""
    return rank.side == "engine" or rank.largest.startswith("engine's")


def _find_left(
    run: PlannedRun, part: tuple[Side, bool], sync: SyncMemory | None = None
) -> list[RankMemory]:
    """Return the ranks of a side that are too large; of an engine's part, those by the engine."""
    side, is_engines = part
    large = find_too_large(run.plan, predict_memory(run, side, sync))
    return [rank for rank in large if not is_engines or _is_engines(rank)]


def _list_candidates(
    run: PlannedRun, side: Side, is_engines: bool, longest_len: int
) -> Iterator[Settings]:
    if is_engines:
        return _list_engine_candidates(run)
    return _list_trained_candidates(run, side, longest_len)


def _sort_by_distance(candidates: list[tuple[float, Settings]]) -> Iterator[Settings]:
    candidates.sort(key=lambda candidate: candidate[0])
    return (settings for distance, settings in candidates if distance <= FARTHEST)


def _list_engine_candidates(run: PlannedRun) -> Iterator[Settings]:
    """Yield wider engines, less KV cache and fewer requests at once, with as many ranks in all or a
    multiple of them.

    Fewer requests take less where layers with linear attention keep states for each.
    """
    rollout = run.rollout
    is_linear = any(linear_layers(run.models.policy.config))
    fewer_requests = (1, 4, 16) if is_linear else (1,)
    for growth in GROWTH:
        candidates = []
        for wider, smaller, fewer, stages in product(
            (1, 2, 4, 8, 16), (1, 2, 4), fewer_requests, (True, False)
        ):
            if rollout.engines * growth % wider or (stages and not rollout.stage_weights):
                continue
            settings = {
                "rollout.engines": rollout.engines * growth // wider,
                "rollout.tp": rollout.tp * wider,
                "rollout.ep": rollout.ep * wider if rollout.ep > 1 else 1,
                "rollout.kv_cache_len": rollout.kv_cache_len // smaller,
                "rollout.max_concurrency": max(rollout.max_concurrency // fewer, 1),
                "rollout.stage_weights": stages,
            }
            distance = log2(wider) + log2(smaller) + (stages != rollout.stage_weights)
            candidates.append((distance + SMALLER_BATCH * log2(fewer), settings))
        yield from _sort_by_distance(candidates)


def _list_trained_candidates(run: PlannedRun, side: Side, longest_len: int) -> Iterator[Settings]:
    """Layouts of the trainer or of the critic, on as many GPUs or on a multiple of them.

    The layout that it has is tried with smaller micro-batches, too. A critic on the trainer's GPUs
    gets the trainer's layout.
    """
    now = run.parallel
    groups = ["parallel"]
    shares = run.cluster.colocated
    if side == "critic":
        assert run.critic is not None, "only a critic has ranks of this side"
        now = run.critic.parallel
        groups = ["critic.parallel"]
        shares = False
    elif run.critic is not None and run.critic.colocated:
        groups.append("critic.parallel")
        shares = True
    recompute_now = run.train.recompute
    offload_now = run.cluster.offload
    tokens_now = run.train.max_tokens_per_microbatch
    smaller = [tokens_now // n for n in (1, 2, 4) if n == 1 or tokens_now // n >= longest_len]
    recomputes = list_recomputes(recompute_now)
    sizes = run.models.policy.sizes
    for growth in GROWTH:
        candidates = []
        num_ranks = now.world_size * growth
        for layout, distance in _list_layouts(now, num_ranks, sizes, run.plan.ranks_per_host):
            settings = {
                f"{group}.{name}": value for group in groups for name, value in layout.items()
            }
            batches = [tokens_now] if distance or growth > 1 else smaller
            for recompute, offload, tokens in product(recomputes, {offload_now, shares}, batches):
                steps = recomputes.index(recompute) - recomputes.index(recompute_now)
                away = distance + abs(steps) + (offload != offload_now)
                away += SMALLER_BATCH * log2(tokens_now / tokens)
                more = {
                    "train.recompute": recompute,
                    "cluster.offload": offload,
                    "train.max_tokens_per_microbatch": tokens,
                }
                candidates.append((away, settings | more))
        yield from _sort_by_distance(candidates)


def _list_layouts(
    now: ParallelConfig, num_ranks: int, sizes: Mapping[str, int], ranks_per_host: int
) -> Iterator[tuple[dict[str, Any], float]]:
    """Options of ParallelConfig for `num_ranks` ranks, each with its distance from `now`."""
    experts = sizes["experts"] or 1
    limits = (ranks_per_host, sizes["layers"], 8, experts)
    expert_tps = _list_powers(4) if experts > 1 else [now.etp]
    for tp, pp, cp, ep, etp in product(*map(_list_powers, limits), expert_tps):
        dp, rest = divmod(num_ranks, tp * pp * cp)
        if rest or not dp or (tp * cp * dp) % (ep * etp):
            continue
        ratios = (tp / now.tp, pp / now.pp, cp / now.cp, ep / now.ep, etp / now.etp)
        layout: dict[str, Any] = {
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "etp": etp,
            "dp": dp,
        }
        if pp != now.pp:
            layout |= _divide_layers(sizes["layers"], pp)
        yield layout, sum(abs(log2(ratio)) for ratio in ratios)


def _divide_layers(num_layers: int, pp: int) -> dict[str, Any]:
    """Options for `pp` stages; if `pp` does not divide the layers, the last stage takes fewer."""
    most = ceil(num_layers / pp)
    last = num_layers - (pp - 1) * most
    uneven = pp > 1 and num_layers % pp and last > 0
    return {"vpp": None, "stage_layers": [most] * (pp - 1) + [last] if uneven else []}


def _list_powers(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length())]


def _select_changes(run: PlannedRun, settings: Settings) -> Settings:
    """The settings that differ from the recipe's."""

    def read(option: str) -> Any:
        """Return the value that the option has, even where it follows from others."""
        return value_of(run, f"{option}_size" if option.endswith("parallel.dp") else option)

    return {option: value for option, value in settings.items() if read(option) != value}
