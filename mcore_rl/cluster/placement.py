"""Where ranks run: Ray bundles in, reserved slots out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from mcore_rl.planning.bundles import Bundle, make_bundle


@dataclass(frozen=True)
class Slot:
    """Resources reserved for one process."""

    group: PlacementGroup
    bundle_index: int
    bundle: Bundle
    """What the process takes of it."""
    node: str


def divide(slots: Sequence[Slot], num_tenants: int) -> list[Slot]:
    """The slots of one of so many processes that each bundle hosts: that which has the bundle's GPU."""
    return [replace(s, bundle={**s.bundle, "CPU": s.bundle["CPU"] / num_tenants}) for s in slots]


def colocate_ranks(slots: Sequence[Slot], num_ranks: int) -> list[Slot]:
    """Slots for ranks beside the first of `slots`, on their GPUs, which Ray does not assign twice."""
    return [replace(slot, bundle=make_bundle(slot.bundle["CPU"], 0)) for slot in slots[:num_ranks]]


def colocate_engines(
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
        of_engines.append(colocate_ranks([part[0] for part in parts], len(parts)))
    return of_engines


def gpus_per_node() -> int:
    """GPUs of the largest node of the cluster; 0 where no node has one."""
    return max(
        (int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0
    )


def reserve(plans: Sequence[Sequence[Bundle]], timeout_s: float) -> list[list[Slot]]:
    """Reserve all bundles or none, packed on few nodes; neighbours in a plan share a node where possible.

    Raises ValueError naming what is asked for and what is free, if that is not enough after `timeout_s`.
    """
    bundles = [bundle for plan in plans for bundle in plan]
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_s):
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        total, free = ray.cluster_resources(), ray.available_resources()
        have = ", ".join(
            f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in asked
        )
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
