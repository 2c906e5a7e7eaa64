"""Where the ranks run: a recipe's ranks and engines in, Ray bundles out; each bundle hosts one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

Bundle = Mapping[str, float]


@dataclass(frozen=True)
class Slot:
    """Resources reserved for one process."""

    group: PlacementGroup
    bundle_index: int
    bundle: Bundle


def plan_trainer(num_ranks: int, cpus_per_rank: float, gpus_per_node: int) -> list[Bundle]:
    """One bundle per training rank, with one GPU where there are any."""
    return [_bundle(cpus_per_rank, min(1, gpus_per_node))] * num_ranks


def plan_engine(num_ranks: int, cpus_per_rank: float, gpus_per_node: int) -> list[Bundle]:
    """One bundle per node that the engine spans. ValueError if its ranks fill no whole number of nodes."""
    if gpus_per_node == 0 or num_ranks <= gpus_per_node:
        return [_bundle(cpus_per_rank * num_ranks, num_ranks if gpus_per_node else 0)]
    if num_ranks % gpus_per_node:
        raise ValueError(
            f"rollout.tp * rollout.pp = {num_ranks} fills no whole number of nodes of {gpus_per_node} GPUs;"
            " take a multiple or less"
        )
    return [_bundle(cpus_per_rank * gpus_per_node, gpus_per_node)] * (num_ranks // gpus_per_node)


def gpus_per_node() -> int:
    """GPUs of the largest node of the cluster; 0 where no node has one."""
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)


def reserve(plans: Sequence[Sequence[Bundle]], timeout_s: float) -> list[list[Slot]]:
    """Reserve all bundles or none, packed on few nodes; neighbours in a plan share a node where possible.

    Raises ValueError naming what is asked for and what is free, if that is not enough after `timeout_s`.
    """
    bundles = [bundle for plan in plans for bundle in plan]
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_s):
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        total, free = ray.cluster_resources(), ray.available_resources()
        have = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in asked)
        raise ValueError(
            f"the run needs {asked['CPU']:g} CPU and {asked['GPU']:g} GPU in {len(bundles)} bundles; after"
            f" {timeout_s:g} s the Ray cluster has free: {have}."
            " Lower cluster.cpus_per_rank, parallel.* or rollout.*"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    slots, first = [], 0
    for plan in plans:
        indices = sorted(range(first, first + len(plan)), key=lambda i: (nodes[i], i))
        slots.append([Slot(group, i, bundles[i]) for i in indices])
        first += len(plan)
    return slots


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
