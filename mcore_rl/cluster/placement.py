"""Reserves slots in the Ray cluster for bundles, and reports where ranks and engines are."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from mcore_rl.cluster.nodes import POLL_S, Node, list_alive_nodes
from mcore_rl.config import ClusterConfig, RolloutConfig
from mcore_rl.planning.bundles import Bundle, RunSize
from mcore_rl.planning.slots import RunSlots, Slot, reserve_slots


def report_placement(slots: RunSlots, nodes: Sequence[Node]) -> list[str]:
    """Return a line for each node that has processes of the run, in the order of the nodes."""
    return [
        f"node {node.name} ({node.address}): {'; '.join(seated)}"
        for node in nodes
        if (seated := list(_list_processes(slots, node.id)))
    ]


def _list_processes(slots: RunSlots, node: str) -> Iterator[str]:
    for role, ranks in (("trainer", slots.trainer), ("critic", slots.critic)):
        indices = [index for index, slot in enumerate(ranks) if slot.node == node]
        if indices:
            yield f"{role} {_describe_ranks(indices)}"
    yield from _list_engines("engine", slots.engines, node)
    for role, engines in slots.served.items():
        yield from _list_engines(role, engines, node)


def _list_engines(role: str, engines: Sequence[Sequence[Slot]], node: str) -> Iterator[str]:
    parts: dict[int, list[int]] = defaultdict(list)
    for index, engine in enumerate(engines):
        for part, slot in enumerate(engine):
            if slot.node == node:
                parts[index].append(part)
    for index, here in parts.items():
        num_parts = len(engines[index])
        whole = len(here) == num_parts
        yield f"{role} {index}" if whole else f"{role} {index} (part {here[0] + 1} of {num_parts})"


def _describe_ranks(indices: Sequence[int]) -> str:
    """Return the ranks in words, consecutive ranks as a range."""
    first, last = indices[0], indices[-1]
    if first == last:
        return f"rank {first}"
    if last - first + 1 == len(indices):
        return f"ranks {first}-{last}"
    return f"ranks {', '.join(map(str, indices))}"


def find_gpus_per_node() -> int:
    """Return the GPUs of the cluster's largest node; 0 if no node has one."""
    return max((node.gpus for node in list_alive_nodes()), default=0)


def reserve_in_ray(
    size: RunSize,
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    timeout_s: float,
    run: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> RunSlots:
    """Reserve slots for the processes of a run within `timeout_s`; see planning.slots.

    run   calls a function in the process that the slots end with
    """

    def in_ray(plans: Sequence[Sequence[Bundle]], spread: Collection[int] = ()) -> list[list[Slot]]:
        return run(partial(reserve, plans, timeout_s, spread))

    return reserve_slots(size, rollout, cluster, find_gpus_per_node(), in_ray)


def reserve(
    plans: Sequence[Sequence[Bundle]], timeout_s: float, spread: Collection[int] = ()
) -> list[list[Slot]]:
    """Reserve all bundles or none, packed on few nodes; return the slots of each plan.

    Each bundle of the plans numbered in `spread` gets a node of its own. If the cluster has fewer
    nodes than such a plan has bundles, an engine's servers share a node, as in a rehearsal on one
    machine. Neighbors in other plans share a node where possible, and nodes follow in their order.
    Raises ValueError, which names needed and free resources, if these do not suffice in time.
    """
    nodes = list_alive_nodes()
    apart = [k for k in sorted(spread) if 1 < len(plans[k]) <= len(nodes)]
    together = [k for k in range(len(plans)) if k not in apart]
    # Plans in `spread` come first: they need room on several nodes, which other plans could fill.
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
            raise ValueError(_describe_shortage(plans, timeout_s, strategy == "STRICT_SPREAD"))
        slots |= _make_slots(groups[-1], {k: plans[k] for k in numbers}, order)
    return [slots[k] for k in range(len(plans))]


@dataclass(frozen=True)
class Seat:
    """Where a rank is: Ray's id of the node, and the GPUs that Ray assigned to the rank there."""

    node: str
    gpus: tuple[str, ...]


class NoRoomError(RuntimeError):
    """No node has room for processes whose node is lost."""


ROOM_S = 30.0
"""How long Ray may take to find room for the bundles of a lost node."""


def wait_for_room(slots: Sequence[Slot]) -> None:
    """Return once the bundles of all slots lie on living nodes; Ray moves those of a lost node.

    Raises NoRoomError after ROOM_S.
    """
    until_s = time.monotonic() + ROOM_S
    while not _are_placed(slots):
        if time.monotonic() > until_s:
            raise NoRoomError(
                f"no node has had room for the ranks of a lost node for {ROOM_S:g} s: a job with a"
                " spare node (launch.nodes) goes on there"
            )
        time.sleep(POLL_S)


async def find_room(slots: Sequence[Slot], timeout_s: float) -> bool:
    """Return whether the bundles of all slots lie on living nodes within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(_are_placed, slots):
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


def find_places(slots: Sequence[Slot]) -> dict[int, str]:
    """Return by slot the id of the node where its bundle lies; without those on lost nodes.

    A node that does not answer counts as lost.
    """
    groups = {slot.group.id: slot.group for slot in slots}
    tables = {key: placement_group_table(group) for key, group in groups.items()}
    nodes = [tables[slot.group.id]["bundles_to_node_id"][slot.bundle_index] for slot in slots]
    used = [node for node in list_alive_nodes() if node.id in nodes]
    alive = {node.id for node in used if node.answers()}
    return {number: node for number, node in enumerate(nodes) if node in alive}


def _are_placed(slots: Sequence[Slot]) -> bool:
    return len(find_places(slots)) == len(slots)


def _make_slots(
    group: PlacementGroup, plans: Mapping[int, Sequence[Bundle]], order: Mapping[str, int]
) -> dict[int, list[Slot]]:
    """Return plan number -> slots; the bundles of a plan follow one another in the group."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    slots = {}
    first = 0
    for number, plan in plans.items():
        indices = sorted(range(first, first + len(plan)), key=lambda i: (order[nodes[i]], i))
        slots[number] = [Slot(group, i, plan[i - first], nodes[i]) for i in indices]
        first += len(plan)
    return slots


def _describe_shortage(
    plans: Sequence[Sequence[Bundle]], timeout_s: float, for_spread: bool
) -> str:
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
