"""Reserves slots in the Ray cluster for resource bundles, and so decides where ranks run."""

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from mcore_rl.cluster.nodes import alive_nodes
from mcore_rl.planning.bundles import Bundle, make_bundle


@dataclass(frozen=True)
class Slot:
    """Resources reserved for one process.

    bundle_index   of the reserved bundle in the placement group
    bundle         the resources that this process takes of that bundle
    node           Ray's id of the node
    """

    group: PlacementGroup
    bundle_index: int
    bundle: Bundle
    node: str


def divide(slots: Sequence[Slot], num_tenants: int) -> list[Slot]:
    """Return the slots of the process that takes each bundle's GPU, with its share of the CPUs.

    `num_tenants` processes share each bundle; the others get theirs from `colocate_ranks`.
    """
    divided = []
    for slot in slots:
        num_cpus = slot.bundle["CPU"] / num_tenants
        divided.append(replace(slot, bundle={**slot.bundle, "CPU": num_cpus}))
    return divided


def colocate_ranks(slots: Sequence[Slot], num_ranks: int) -> list[Slot]:
    """Return slots beside the first `num_ranks` of `slots`, on the same GPUs.

    They ask Ray for no GPU, because Ray does not assign one twice.
    """
    return [replace(slot, bundle=make_bundle(slot.bundle["CPU"], 0)) for slot in slots[:num_ranks]]


def colocate_engines(
    slots: Sequence[Slot],
    num_engines: int,
    ranks_per_engine: int,
    num_nodes: int = 0,
    role: str = "rollout",
) -> list[list[Slot]]:
    """Return slots of engines on the training ranks' GPUs: for each engine, one per node it spans.

    Engine e is placed beside the ranks from e * `ranks_per_engine` on. A slot stands for all the
    engine's ranks on its node and takes no GPU, as those belong to the training ranks. `num_nodes`
    0 means as few as possible. Raises ValueError if the training ranks are not spread evenly over
    that many nodes; the message names the options of `role`.
    """
    most_on_a_node = max(Counter(slot.node for slot in slots).values())
    num_nodes = num_nodes or math.ceil(ranks_per_engine / most_on_a_node)
    ranks_per_node = ranks_per_engine // num_nodes
    slots_of_engines = []
    for engine in range(num_engines):
        first = engine * ranks_per_engine
        neighbors = slots[first : first + ranks_per_engine]
        parts = [
            neighbors[i : i + ranks_per_node] for i in range(0, ranks_per_engine, ranks_per_node)
        ]
        if not all(_is_one_node(part, ranks_per_node) for part in parts):
            raise ValueError(
                f"GPUs are shared, but training ranks {first} to {first + ranks_per_engine - 1} lie"
                f" on {len({slot.node for slot in neighbors})} nodes, on which engine {engine} of"
                f" {role}.tp * {role}.pp = {ranks_per_engine} ranks does not lie evenly; take a"
                " divisor of the GPUs of a node, or a multiple"
            )
        slots_of_engines.append(colocate_ranks([part[0] for part in parts], len(parts)))
    return slots_of_engines


def check_tensor_parallel(slots: Sequence[Slot], tp: int, option: str) -> None:
    """Raise ValueError, naming the ranks, if the ranks of a tensor-parallel group share no node.

    They exchange activations in every layer, which takes NVLink.
    """
    for first in range(0, len(slots), tp):
        nodes = Counter(slot.node for slot in slots[first : first + tp])
        if len(nodes) > 1:
            parts = " and ".join(f"{count} on node {node}" for node, count in nodes.items())
            raise ValueError(
                f"{option}={tp}: ranks {first} to {first + tp - 1} exchange activations in every"
                f" layer, but Ray has room for {parts}. Free whole nodes, or take a {option} that"
                " divides the free GPUs of each"
            )


def _is_one_node(slots: Sequence[Slot], num_ranks: int) -> bool:
    """Return whether these are `num_ranks` slots of a single node."""
    return len(slots) == num_ranks and len({slot.node for slot in slots}) == 1


def gpus_per_node() -> int:
    """Return the GPUs of the cluster's largest node; 0 if no node has one."""
    return max((node.gpus for node in alive_nodes()), default=0)


def reserve(
    plans: Sequence[Sequence[Bundle]], timeout_s: float, spread: Collection[int] = ()
) -> list[list[Slot]]:
    """Reserve all bundles or none, packed on few nodes; return the slots of each plan.

    Each bundle of the plans numbered in `spread` gets a node of its own, unless the cluster has
    fewer nodes than such a plan has bundles: then servers of an engine share one, as in a rehearsal
    on one machine. Neighbors in other plans share a node where possible, and nodes follow in their
    order. Raises ValueError naming what is needed and what is free if that does not suffice within
    `timeout_s`.
    """
    nodes = alive_nodes()
    apart = [k for k in sorted(spread) if 1 < len(plans[k]) <= len(nodes)]
    together = [k for k in range(len(plans)) if k not in apart]
    # Plans that are apart come first: the others would fill nodes that these need a part of.
    requests = [([k], "STRICT_SPREAD") for k in apart] + [(together, "PACK")]
    order = {node.id: position for position, node in enumerate(nodes)}
    until_s = time.monotonic() + timeout_s
    slots: dict[int, list[Slot]] = {}
    groups: list[PlacementGroup] = []
    for numbers, strategy in requests:
        bundles = [dict(bundle) for k in numbers for bundle in plans[k]]
        if not bundles:
            slots |= {k: [] for k in numbers}
            continue
        groups.append(placement_group(bundles, strategy=strategy))
        if not groups[-1].wait(max(until_s - time.monotonic(), 0.0)):
            for group in groups:
                remove_placement_group(group)
            raise ValueError(_shortage(plans, timeout_s, strategy == "STRICT_SPREAD"))
        slots |= _slots(groups[-1], {k: plans[k] for k in numbers}, order)
    return [slots[k] for k in range(len(plans))]


def _slots(
    group: PlacementGroup, plans: Mapping[int, Sequence[Bundle]], order: Mapping[str, int]
) -> dict[int, list[Slot]]:
    """Return the slots of plans by number, whose bundles follow one another in the group."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    slots = {}
    first = 0
    for number, plan in plans.items():
        indices = sorted(range(first, first + len(plan)), key=lambda i: (order[nodes[i]], i))
        slots[number] = [Slot(group, i, plan[i - first], nodes[i]) for i in indices]
        first += len(plan)
    return slots


def _shortage(plans: Sequence[Sequence[Bundle]], timeout_s: float, for_spread: bool) -> str:
    bundles = [bundle for plan in plans for bundle in plan]
    needed = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
    total = ray.cluster_resources()
    free = ray.available_resources()
    have = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in needed)
    kinds = {kind for bundle in bundles for kind in bundle}
    if missing := sorted(kinds - total.keys()):
        have += f"; no node has Ray's resource {' or '.join(missing)}"
    if for_spread:
        have += "; each part of an engine needs a node of its own (rollout.nodes_per_engine)"
    return (
        f"the run needs {needed['CPU']:g} CPU and {needed['GPU']:g} GPU in {len(bundles)} bundles;"
        f" after {timeout_s:g} s the Ray cluster has free: {have}. Lower cluster.cpus_per_rank,"
        " parallel.*, rollout.* or what judge, reward_model and teacher take"
    )
