"""Starts the process of a rank, or of another worker, in its slot."""

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.cluster.answers import Rank
from mcore_rl.cluster.rank_actor import RankActor
from mcore_rl.planning.slots import Slot
from mcore_rl.process.cores import THREADS

BULK = "bulk"
"""Concurrency group of calls that move much; others need not wait for them."""
BULK_THREADS = 8


def start_actor(
    rank: Rank,
    slot: Slot,
    runtime_env: Mapping[str, Any] | None,
    threads: int,
    returns: bool = False,
) -> Any:
    """Return the handle of a new RankActor, which answers up to `threads` calls at once.

    One that answers several takes those of the group BULK in threads of their own. `returns`: Ray
    starts the process again when it dies, without its worker; the handle stays good.
    """
    # Ray titles the process after the class: `ps` shows ray::trainer_rank0
    actor_cls: Any = type(f"{rank.role}_rank{rank.index}", (RankActor,), {})
    options: dict[str, Any] = {
        "num_cpus": slot.bundle["CPU"],
        "num_gpus": slot.bundle.get("GPU", 0),
        "max_concurrency": threads,
        "max_restarts": -1 if returns else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, slot.bundle_index),
    }
    if runtime_env is not None:
        options["runtime_env"] = dict(runtime_env)
    make_remote: Any = ray.remote
    if threads > 1:
        make_remote = make_remote(concurrency_groups={BULK: BULK_THREADS})
    # Whoever set the number of threads gets it in every process.
    cores = (slot.sharers, os.environ.get(THREADS)) if slot.sharers else None
    return make_remote(actor_cls).options(**options).remote(str(rank.log_path), cores, os.getcwd())
