"""Gives each process of a run its slot on a node, given the sizes of its ranks and engines.

Whoever has the nodes reserves the bundles: Ray, or the simulator.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from mcore_rl.config import ClusterConfig, RolloutConfig
from mcore_rl.planning.bundles import Bundle, RunSize, make_bundle, plan_run


@dataclass(frozen=True)
class Slot:
    """Resources reserved for one process.

    group          what reserved them: Ray's placement group
    bundle_index   of the reserved bundle in the placement group
    bundle         the resources that this process takes of that bundle
    node           id of the node
    sharers        processes that share the node's cores while this one computes, itself included;
                   0: it keeps to the CPUs of the bundle
    """

    group: Any
    bundle_index: int
    bundle: Bundle
    node: str
    sharers: int = 0


class Reserve(Protocol):
    """Reserves all bundles or none; returns the slots of each plan, or raises ValueError."""

    def __call__(
        self, plans: Sequence[Sequence[Bundle]], spread: Collection[int] = ()
    ) -> list[list[Slot]]:
        """Each bundle of the plans numbered in `spread` gets a node of its own."""
        ...


@dataclass(frozen=True)
class RunSlots:
    """The slots of each role.

    engines   for each engine of the policy, one slot per machine that it spans
    served    the same for each judge, reward model and teacher, by role
    """

    trainer: list[Slot]
    critic: list[Slot]
    engines: list[list[Slot]]
    served: dict[str, list[list[Slot]]]


def reserve_slots(
    size: RunSize,
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    gpus_per_node: int,
    reserve: Reserve,
) -> RunSlots:
    """Reserve room for the processes; colocated ones share that of the trainer's ranks.

    `gpus_per_node` is that of the largest node. Raises ValueError if there is not enough room, if
    colocated engines do not fit or if a tensor-parallel group would lie on two nodes.
    """
    bundles = plan_run(size, rollout, cluster, gpus_per_node)
    num_own = len(bundles.models)
    plans = [*bundles.models, *bundles.served_engines]
    num_ranks = num_own - len(bundles.engines)  # plans of trainer and critic
    reserved = reserve(plans, spread=range(num_ranks, len(plans)))
    trainer = divide(reserved[0], size.tenants)
    critic = reserved[1]
    check_tensor_parallel(trainer, size.trainer_tp, "parallel.tp")
    check_tensor_parallel(critic, size.critic_tp, "critic.parallel.tp")
    engines = reserved[2:num_own]
    served = _group_by_role(bundles.served, iter(reserved[num_own:]))
    if size.critic_colocated:
        critic = colocate_ranks(trainer, size.critic)
    if size.engines_colocated:
        engines = colocate_engines(
            trainer, size.engines, rollout.engine_ranks, rollout.nodes_per_engine
        )
    for role, model in size.colocated_served.items():
        served[role] = colocate_engines(trainer, model.engines, model.engine_ranks, role=role)
    slots = RunSlots(trainer, critic, engines, served)
    return slots if gpus_per_node else share_cores(slots, in_turns=rollout.mode == "sync")


def share_cores(slots: RunSlots, *, in_turns: bool) -> RunSlots:
    """Return the slots with the number of processes that share the cores of each one's node.

    in_turns   ranks do not train while engines generate, so that each phase has all cores
    """
    training = Counter(slot.node for slot in (*slots.trainer, *slots.critic))
    of_engines = [*slots.engines, *(parts for role in slots.served.values() for parts in role)]
    generating = Counter(slot.node for parts in of_engines for slot in parts)
    if not in_turns:
        training = generating = training + generating

    def set_sharers(parts: Sequence[Slot], sharers: Counter[str]) -> list[Slot]:
        return [replace(slot, sharers=sharers[slot.node]) for slot in parts]

    return RunSlots(
        set_sharers(slots.trainer, training),
        set_sharers(slots.critic, training),
        [set_sharers(parts, generating) for parts in slots.engines],
        {
            role: [set_sharers(parts, generating) for parts in engines]
            for role, engines in slots.served.items()
        },
    )


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


def _group_by_role(
    bundles: dict[str, list[list[Bundle]]], slots: Iterator[list[Slot]]
) -> dict[str, list[list[Slot]]]:
    """Hand out the slots in order, as many to each role as it has engines."""
    return {role: list(islice(slots, len(of_role))) for role, of_role in bundles.items()}
