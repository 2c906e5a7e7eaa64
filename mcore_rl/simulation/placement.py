"""Places the processes of a recipe on machines, as Ray does with the CPUs that each reserves."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config import Config, ParallelConfig
from mcore_rl.planning.bundles import Bundle, plan_run
from mcore_rl.planning.run_size import RunSize
from mcore_rl.simulation.machine import Machine, WorkClock
from mcore_rl.simulation.virtual_loop import VirtualLoop

RANK_CORES = 0.7
PIPELINE_RANK_CORES = 0.6
"""Share of a core that a trainer rank needs that waits for others, or for other stages. One alone
needs a whole core, and so does an engine's rank."""
BESIDE_ENGINE_CORES = (0.35, 0.17)
"""The same of an engine's server and detokenizer together, and of its collector. All are measured,
on a laptop."""
_SLACK = 1e-9
"""Sums of reserved CPUs may be off by so much."""


@dataclass(frozen=True)
class ProcessPlacement:
    """The clocks of trainer, critic and engines: each counts the seconds that its processes work.

    They show the loop's time where no cores are shared.
    """

    trainer: WorkClock
    critic: WorkClock
    engines: Sequence[WorkClock]

    @staticmethod
    def of(config: Config, loop: VirtualLoop) -> "ProcessPlacement":
        """Raises ValueError if processes of one machine need more than simulate.cores."""
        engines = config.rollout.engines
        if not config.simulate.cores:
            free = [WorkClock(loop, {}) for _ in range(engines + 2)]
            return ProcessPlacement(free[0], free[1], free[2:])
        size = RunSize.of(config, "train")
        bundles = plan_run(size, config.rollout, config.cluster, gpus_per_node=0)
        machines = _Machines(config.simulate.cores)
        trainer = machines.place(bundles.trainer)
        critic = trainer if size.critic_colocated else machines.place(bundles.critic)
        if config.cluster.separate_nodes:
            machines.close()
        ranks = config.rollout.engine_ranks
        if size.engines_colocated:
            places = [trainer[k * ranks : (k + 1) * ranks] for k in range(engines)]
        else:
            nodes = (machines.place(plan) for plan in bundles.engines)
            # An engine has one bundle for all its ranks of a node.
            places = [
                [node for node in engine for _ in range(ranks // len(engine))] for engine in nodes
            ]
        return ProcessPlacement(
            WorkClock(loop, _cores(trainer, _of_rank(config.parallel))),
            WorkClock(loop, _cores(critic, _of_rank(config.critic.parallel))),
            [WorkClock(loop, _cores(place, 1.0, BESIDE_ENGINE_CORES)) for place in places],
        )


class _Machines:
    """As many machines of `num_cores` cores as it takes."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._free: list[tuple[Machine, float]] = []

    def place(self, bundles: Sequence[Bundle]) -> list[Machine]:
        """Return the machine of each bundle: the first one with so many CPUs left."""
        return [self._place(bundle["CPU"]) for bundle in bundles]

    def close(self) -> None:
        """Place nothing more on the machines that there are."""
        self._free = []

    def _place(self, cpus: float) -> Machine:
        for k, (machine, free) in enumerate(self._free):
            if cpus <= free + _SLACK:
                self._free[k] = (machine, free - cpus)
                return machine
        if cpus > self._num_cores:
            raise ValueError(
                f"processes of a recipe reserve {cpus:g} CPUs of one machine, which has"
                f" simulate.cores={self._num_cores}: raise it, or lower cluster.cpus_per_rank"
            )
        machine = Machine(self._num_cores)
        self._free.append((machine, self._num_cores - cpus))
        return machine


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
