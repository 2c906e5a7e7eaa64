"""Where the ranks run: a recipe's ranks and engines in, Ray bundles out; each bundle hosts one process."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

Bundle = Mapping[str, float]


@dataclass(frozen=True)
class Slot:
    """Resources reserved for one process."""

    group: PlacementGroup
    bundle_index: int
    bundle: Bundle
    """What the process takes of it."""
    node: str


def plan_ranks(num_ranks: int, cpus_per_rank: float, gpus_per_node: int) -> list[Bundle]:
    """One bundle per rank of trainer or critic, with one GPU where there are any."""
    return [_bundle(cpus_per_rank, min(1, gpus_per_node))] * num_ranks


def plan_engine(
    num_ranks: int, cpus_per_rank: float, gpus_per_node: int, num_nodes: int = 0, role: str = "rollout"
) -> list[Bundle]:
    """One bundle per node that the engine spans, `num_nodes` or, for 0, as many as its GPUs fill.

    ValueError if its ranks fill no whole number of nodes, or more of each than there is; it names the options
    of `role`.
    """
    if not num_nodes and gpus_per_node:
        num_nodes = -(-num_ranks // gpus_per_node)
        if num_nodes > 1 and num_ranks % gpus_per_node:
            raise ValueError(
                f"{role}.tp * {role}.pp = {num_ranks} fills no whole number of nodes of {gpus_per_node}"
                " GPUs; take a multiple or less"
            )
    on_each = num_ranks // max(num_nodes, 1)
    if 0 < gpus_per_node < on_each:
        raise ValueError(
            f"{role}.nodes_per_engine={num_nodes} puts {on_each} ranks on a node, which has {gpus_per_node}"
            " GPUs; take more nodes, or 0"
        )
    return [_bundle(cpus_per_rank * on_each, on_each if gpus_per_node else 0)] * max(num_nodes, 1)


def divide(slots: Sequence[Slot], num_tenants: int) -> list[Slot]:
    """The slots of one of so many processes that each bundle hosts: that which has the bundle's GPU."""
    return [replace(s, bundle={**s.bundle, "CPU": s.bundle["CPU"] / num_tenants}) for s in slots]


def beside(slots: Sequence[Slot], num_ranks: int) -> list[Slot]:
    """Slots for ranks beside the first of `slots`, on their GPUs, which Ray does not assign twice."""
    return [replace(slot, bundle=_bundle(slot.bundle["CPU"], 0)) for slot in slots[:num_ranks]]


def engines_beside(
    slots: Sequence[Slot],
    num_engines: int,
    ranks_per_engine: int,
    num_nodes: int = 0,
    role: str = "rollout",
) -> list[list[Slot]]:
    """Slots of engines on the GPUs of training ranks: per engine, one for each node it spans.

    Engine e lies beside the ranks from e * `ranks_per_engine` on; a slot of an engine stands for all its
    ranks on that node and takes no GPU, as those belong to the training ranks. `num_nodes` 0: as few as
    can be. ValueError if the ranks do not lie evenly on so many; it names the options of `role`.
    """
    most_on_a_node = max(Counter(slot.node for slot in slots).values())
    on_each = ranks_per_engine // (num_nodes or -(-ranks_per_engine // most_on_a_node))
    of_engines = []
    for engine in range(num_engines):
        first = engine * ranks_per_engine
        neighbours = slots[first : first + ranks_per_engine]
        parts = [neighbours[i : i + on_each] for i in range(0, ranks_per_engine, on_each)]
        if any(len({slot.node for slot in part}) > 1 or len(part) < on_each for part in parts):
            raise ValueError(
                f"GPUs are shared, but training ranks {first} to {first + ranks_per_engine - 1} lie on"
                f" {len({slot.node for slot in neighbours})} nodes, on which engine {engine} of {role}.tp *"
                f" {role}.pp = {ranks_per_engine} ranks does not lie evenly; take a divisor of the GPUs of a"
                " node, or a multiple"
            )
        of_engines.append(beside([part[0] for part in parts], len(parts)))
    return of_engines


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
            " Lower cluster.cpus_per_rank, parallel.*, rollout.* or what judge, reward_model and teacher take"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    slots, first = [], 0
    for plan in plans:
        indices = sorted(range(first, first + len(plan)), key=lambda i: (nodes[i], i))
        slots.append([Slot(group, i, bundles[i], nodes[i]) for i in indices])
        first += len(plan)
    return slots


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
