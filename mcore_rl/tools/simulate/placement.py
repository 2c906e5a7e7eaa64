"""Places the processes of a recipe on nodes, by the code that places those of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config import Config, ParallelConfig
from mcore_rl.planning.run_size import RunSize
from mcore_rl.planning.slots import Slot, reserve_slots
from mcore_rl.tools.simulate.machine import Machine, WorkClock
from mcore_rl.tools.simulate.nodes import ImaginedNodes
from mcore_rl.tools.simulate.virtual_loop import VirtualLoop

RANK_CORES = 0.7
PIPELINE_RANK_CORES = 0.6
"""Share of a core that a trainer rank needs that waits for others, or for other stages. One alone
needs a whole core, and so does an engine's rank."""
BESIDE_ENGINE_CORES = (0.35, 0.17)
"""The same of an engine's server and detokenizer together, and of its collector. All are measured,
on a laptop."""


@dataclass(frozen=True)
class ProcessPlacement:
    """Where the processes of a run are, and the clocks of trainer, critic and engines.

    A clock counts the seconds that its processes work: it shows the loop's time where no cores are
    shared.

    trainer_nodes   nodes with ranks of trainer or critic
    engine_nodes    the nodes of each engine; its collector is on the first
    """

    trainer: WorkClock
    critic: WorkClock
    engines: Sequence[WorkClock]
    trainer_nodes: frozenset[str]
    engine_nodes: Sequence[tuple[str, ...]]

    @staticmethod
    def of(config: Config, loop: VirtualLoop) -> "ProcessPlacement":
        """Place processes as a run does, on nodes of simulate.cores or of plan.ranks_per_host.

        Raises ValueError if they fit no node, or if a tensor-parallel group would lie on two.
        """
        cores = config.simulate.cores
        engine_ranks = config.rollout.engine_ranks
        gpus_per_node = 0 if cores else config.plan.ranks_per_host
        nodes = ImaginedNodes(cores or math.inf, gpus_per_node)
        size = RunSize.of(config, "train")
        slots = reserve_slots(size, config.rollout, config.cluster, gpus_per_node, nodes.reserve)
        machines = {name: Machine(cores) for name in nodes.names} if cores else {}

        def clock(places: Sequence[str], of_rank: float, beside: Sequence[float] = ()) -> WorkClock:
            own = [machines[place] for place in places] if cores else []
            return WorkClock(loop, _cores(own, of_rank, beside))

        def nodes_of(ranks: Sequence[Slot]) -> list[str]:
            return [slot.node for slot in ranks]

        # An engine has one slot for all its ranks of a node.
        ranks_of_engines = [
            nodes_of([slot for slot in engine for _ in range(engine_ranks // len(engine))])
            for engine in slots.engines
        ]
        return ProcessPlacement(
            clock(nodes_of(slots.trainer), _of_rank(config.parallel)),
            clock(nodes_of(slots.critic), _of_rank(config.critic.parallel)),
            [clock(places, 1.0, BESIDE_ENGINE_CORES) for places in ranks_of_engines],
            frozenset(nodes_of([*slots.trainer, *slots.critic])),
            [tuple(dict.fromkeys(nodes_of(engine))) for engine in slots.engines],
        )

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes with processes."""
        return self.trainer_nodes.union(*self.engine_nodes)

    def engines_by_collector(self) -> list[list[int]]:
        """Return the engines of each collector: one sits on each node that begins an engine."""
        homes: dict[str, list[int]] = {}
        for engine, nodes in enumerate(self.engine_nodes):
            homes.setdefault(nodes[0], []).append(engine)
        return list(homes.values())


def _cores(
    places: Sequence[Machine], of_rank: float, beside: Sequence[float] = ()
) -> dict[Machine, list[float]]:
    """Return the share of a core that each rank at `places` needs, by machine.

    beside   the same of processes on the first rank's machine
    """
    cores = {machine: [of_rank] * places.count(machine) for machine in dict.fromkeys(places)}
    if places:
        cores[places[0]] += beside
    return cores


def _of_rank(parallel: ParallelConfig) -> float:
    """Return the share of a core that a trainer rank needs."""
    if parallel.world_size == 1:
        return 1.0
    return PIPELINE_RANK_CORES if parallel.pp > 1 else RANK_CORES
