"""Reserves slots on imagined nodes, as Ray does on real ones: as many nodes as it takes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mcore_rl.planning.bundles import Bundle
from mcore_rl.planning.slots import Slot

_SLACK = 1e-9
"""Sums of reserved CPUs may be off by so much."""


@dataclass
class _ImaginedNode:
    """A node and what is free on it.

    kind   the resource that keeps trainer and engines apart; empty without one
    """

    name: str
    kind: str
    free: dict[str, float] = field(default_factory=dict)

    def fits(self, needs: Bundle) -> bool:
        return all(amount <= self.free[name] + _SLACK for name, amount in needs.items())

    def take(self, needs: Bundle) -> None:
        for name, amount in needs.items():
            self.free[name] -= amount


class ImaginedNodes:
    """Nodes of equal size; further ones join when those that there are have no room."""

    def __init__(self, num_cpus: float, num_gpus: int) -> None:
        """A node has `num_gpus`; with 0, bundles ask for none."""
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._open: list[_ImaginedNode] = []
        """Nodes with room, in their order."""
        self.names: list[str] = []
        """All nodes, in their order."""

    def reserve(
        self, plans: Sequence[Sequence[Bundle]], spread: Collection[int] = ()
    ) -> list[list[Slot]]:
        """Return the slots of each plan, packed on few nodes; plays planning.slots.Reserve.

        Raises ValueError for a bundle that is larger than a node.
        """
        apart = [k for k in sorted(spread) if len(plans[k]) > 1]
        slots: dict[int, list[Slot]] = {}
        for number in [*apart, *(k for k in range(len(plans)) if k not in apart)]:
            avoid: set[str] = set()
            slots[number] = []
            for index, bundle in enumerate(plans[number]):
                node = self._place(bundle, avoid)
                if number in apart:
                    avoid.add(node.name)
                slots[number].append(Slot(number, index, bundle, node.name))
        return [slots[k] for k in range(len(plans))]

    def _place(self, bundle: Bundle, avoid: Collection[str]) -> _ImaginedNode:
        needs = {name: bundle.get(name, 0.0) for name in ("CPU", "GPU")}
        kind = next((name for name in bundle if name not in needs), "")
        for node in self._open:
            if node.kind == kind and node.name not in avoid and node.fits(needs):
                break
        else:
            node = self._new(kind)
            if not node.fits(needs):
                raise ValueError(self._too_large(needs))
        node.take(needs)
        if node.free["GPU" if self._num_gpus else "CPU"] <= _SLACK:
            self._open.remove(node)
        return node

    def _new(self, kind: str) -> _ImaginedNode:
        free = {"CPU": self._num_cpus, "GPU": float(self._num_gpus)}
        node = _ImaginedNode(f"node-{len(self.names)}", kind, free)
        self.names.append(node.name)
        self._open.append(node)
        return node

    def _too_large(self, needs: Bundle) -> str:
        if needs["GPU"] > self._num_gpus:
            return (
                f"processes of a recipe reserve {needs['GPU']:g} GPUs of one machine, which has"
                f" plan.ranks_per_host={self._num_gpus}: raise it, or set rollout.nodes_per_engine"
            )
        return (
            f"processes of a recipe reserve {needs['CPU']:g} CPUs of one machine, which has"
            f" simulate.cores={self._num_cpus:g}: raise it, or lower cluster.cpus_per_rank"
        )
