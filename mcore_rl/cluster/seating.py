"""Says which ranks and engines sit on which node of the cluster."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mcore_rl.cluster.nodes import Node
from mcore_rl.planning.slots import RunSlots, Slot


def describe(slots: RunSlots, nodes: Sequence[Node]) -> list[str]:
    """Return a line for each node that has processes of the run, in the order of the nodes."""
    return [
        f"node {node.name} ({node.address}): {'; '.join(seated)}"
        for node in nodes
        if (seated := list(_seated(slots, node.id)))
    ]


def _seated(slots: RunSlots, node: str) -> Iterator[str]:
    for role, ranks in (("trainer", slots.trainer), ("critic", slots.critic)):
        indices = [index for index, slot in enumerate(ranks) if slot.node == node]
        if indices:
            yield f"{role} {_ranks(indices)}"
    yield from _engines("engine", slots.engines, node)
    for role, engines in slots.served.items():
        yield from _engines(role, engines, node)


def _engines(role: str, engines: Sequence[Sequence[Slot]], node: str) -> Iterator[str]:
    parts: dict[int, list[int]] = defaultdict(list)
    for index, engine in enumerate(engines):
        for part, slot in enumerate(engine):
            if slot.node == node:
                parts[index].append(part)
    for index, here in parts.items():
        num_parts = len(engines[index])
        whole = len(here) == num_parts
        yield f"{role} {index}" if whole else f"{role} {index} (part {here[0] + 1} of {num_parts})"


def _ranks(indices: Sequence[int]) -> str:
    """The ranks in words: as a range where they follow one another."""
    first, last = indices[0], indices[-1]
    if first == last:
        return f"rank {first}"
    if last - first + 1 == len(indices):
        return f"ranks {first}-{last}"
    return f"ranks {', '.join(map(str, indices))}"
