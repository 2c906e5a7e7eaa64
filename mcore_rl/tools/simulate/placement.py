"""Places the processes of a recipe on imagined nodes, and draws when GPUs and machines fail.

The code that places a run's processes reserves slots here, on as many nodes as it takes. A failure
takes down the engines, or the run, that had the GPU or machine. With recoveries, ranks come back
as run/roles/recovery.py brings back those of a run: work that was cut off is done again, and a loss
at another time shows when the ranks are needed next.
"""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mcore_rl.config import ClusterConfig, RolloutConfig, SimulateConfig
from mcore_rl.loops.roles import State
from mcore_rl.planning.bundles import Bundle, RunSize
from mcore_rl.planning.slots import Slot, reserve_slots
from mcore_rl.process.process_state import RestartBudget
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.run.roles.recovery import backoff_s
from mcore_rl.tools.simulate.engine import SimulatedCollector, SimulatedEngine
from mcore_rl.tools.simulate.recovery_costs import RecoveryCosts
from mcore_rl.tools.simulate.virtual_time import (
    Machine,
    VirtualLoop,
    VirtualTime,
    WorkClock,
    context_of,
)

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
        """Return the slots of each plan, packed on few nodes; implements planning.slots.Reserve.

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
    def make(
        loop: VirtualLoop,
        size: RunSize,
        rollout: RolloutConfig,
        cluster: ClusterConfig,
        cores: int,
        ranks_per_host: int,
    ) -> "ProcessPlacement":
        """Place processes as a run does, on nodes of so many cores or, with 0, GPUs.

        Raises ValueError if they fit no node, or if a tensor-parallel group would lie on two.
        """
        gpus_per_node = 0 if cores else ranks_per_host
        nodes = ImaginedNodes(cores or math.inf, gpus_per_node)
        slots = reserve_slots(size, rollout, cluster, gpus_per_node, nodes.reserve)
        machines = {name: Machine(cores) for name in nodes.names} if cores else {}

        def clock(places: Sequence[str], of_rank: float, beside: Sequence[float] = ()) -> WorkClock:
            own = [machines[place] for place in places] if cores else []
            return WorkClock(loop, _cores(own, of_rank, beside))

        def nodes_of(ranks: Sequence[Slot]) -> list[str]:
            return [slot.node for slot in ranks]

        # An engine has one slot for all its ranks of a node.
        ranks_of_engines = [
            nodes_of([slot for slot in engine for _ in range(rollout.engine_ranks // len(engine))])
            for engine in slots.engines
        ]
        return ProcessPlacement(
            clock(nodes_of(slots.trainer), _count_rank_cores(size.trainer, size.trainer_pp)),
            clock(nodes_of(slots.critic), _count_rank_cores(size.critic, size.critic_pp)),
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


def _count_rank_cores(num_ranks: int, pp: int) -> float:
    """Return the share of a core that each of `num_ranks` ranks in `pp` stages needs."""
    if num_ranks == 1:
        return 1.0
    return PIPELINE_RANK_CORES if pp > 1 else RANK_CORES


class RunLostError(RuntimeError):
    """The run has ended and begins again from its newest checkpoint; the message says why."""


class RanksLostError(RuntimeError):
    """Ranks of trainer or critic are lost, and others take their place; the message says why."""


class Failures:
    """Breaks engines, trainer ranks and machines at random times, each a Poisson process."""

    def __init__(
        self,
        loop: VirtualLoop,
        rollout: RolloutConfig,
        simulate: SimulateConfig,
        engines: Mapping[str, SimulatedEngine],
        health: EngineHealth,
        placement: ProcessPlacement,
        collectors: Mapping[str, SimulatedCollector],
        num_trainer_gpus: int,
        draw: random.Random,
        most_recoveries: int = 0,
        engine_losses_s: Sequence[float] = (),
        *,
        in_turn: bool = False,
    ) -> None:
        """`collectors` are those of nodes by name.

        most_recoveries   of lost ranks within an hour; 0: the first loss ends the run
        in_turn           engines are on the ranks' GPUs; lost ones wait for `start_lost`
        engine_losses_s   seconds from now at which one engine after the other is lost, besides
        """
        self._most_recoveries = most_recoveries
        self._num_trainer_gpus = num_trainer_gpus
        self._num_spare = simulate.spare_nodes
        self._recoveries = RestartBudget()
        self.ranks_lost: asyncio.Future[None] = loop.create_future()
        """Raises RanksLostError while ranks are lost that others replace."""
        self._ranks_lost_s = 0.0
        self.num_recoveries = 0
        self._loop = loop
        self._rollout = rollout
        self._simulate = simulate
        self._engines = engines
        self._health = health
        self._placement = placement
        self._collectors = collectors
        self._draw = draw
        self._context = context_of("failures")
        self._timers: list[asyncio.TimerHandle] = []
        self._next_failures: dict[str, asyncio.TimerHandle] = {}
        self._waiting: dict[str, None] | None = {} if in_turn else None
        self._starts: defaultdict[str, RestartBudget] = defaultdict(RestartBudget)
        self.num_engines_lost = 0
        self.num_nodes_lost = 0
        self.lost: asyncio.Future[None] = loop.create_future()
        """Raises RunLostError once the run cannot go on."""
        self._mtbf_s = simulate.mtbf_hours * 3600
        self._node_mtbf_s = simulate.node_mtbf_hours * 3600
        self._arm(engine_losses_s)

    def _arm(self, engine_losses_s: Sequence[float]) -> None:
        """Set the times of the first failures of each kind."""
        if self._mtbf_s:
            if self._num_trainer_gpus:
                self._later(self._next_s(self._num_trainer_gpus), self._lose_trainer)
            for url in self._engines:
                self._arm_engine(url)
        for k, seconds in enumerate(engine_losses_s):
            self._later(seconds, self._lose_engine, list(self._engines)[k % len(self._engines)])
        if self._node_mtbf_s:
            for node in sorted(self._placement.nodes):
                self._arm_node(node)

    def end(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _later(self, seconds: float, function: object, *args: object) -> asyncio.TimerHandle:
        timer = self._loop.call_later(seconds, function, *args, context=self._context)  # type: ignore[arg-type]
        self._timers.append(timer)
        return timer

    def _next_s(self, num_gpus: int) -> float:
        return self._draw.expovariate(num_gpus / self._mtbf_s)

    def _arm_engine(self, url: str) -> None:
        """Set the time of an engine's next failure, in the place of one that was set before."""
        if url in self._next_failures:
            self._next_failures[url].cancel()
        seconds = self._next_s(self._rollout.engine_ranks)
        self._next_failures[url] = self._later(seconds, self._lose_engine, url)

    def _lose_trainer(self) -> None:
        self._later(self._next_s(self._num_trainer_gpus), self._lose_trainer)
        self._lose_ranks("a GPU of the trainer failed")

    def _lose_ranks(self, why: str) -> None:
        """Lose ranks that others replace, or the run if that happens too often within an hour."""
        if self._recoveries.num_recent >= self._most_recoveries:
            self._lose(why)
        elif not self.ranks_lost.done():
            self._recoveries.take(self._most_recoveries)
            self._ranks_lost_s = self._loop.time()
            self.ranks_lost.set_exception(RanksLostError(why))
            self.ranks_lost.exception()  # asyncio wants it read, and it may come between works

    @property
    def seconds_since_loss(self) -> float:
        """Seconds for which ranks have been lost."""
        return self._loop.time() - self._ranks_lost_s

    def replace_ranks(self) -> None:
        """Note that others have taken the place of lost ranks."""
        self.num_recoveries += 1
        self.ranks_lost = self._loop.create_future()

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_exception(RunLostError(why))

    def lose_node(self, node: str) -> None:
        """Lose a machine with its ranks, engines and samples.

        A spare machine takes its place, and fails as often. Without one, the run ends with its
        ranks, and engines are gone for good.
        """
        self.num_nodes_lost += 1
        engines = [
            url
            for url, nodes in zip(self._engines, self._placement.engine_nodes, strict=True)
            if node in nodes and not self._state(url).lost
        ]
        if node in self._placement.trainer_nodes:
            why = f"{node} failed, which has ranks of the trainer or critic"
            if not self._num_spare:
                self._lose(why)
                return
            self._lose_ranks(why)
        is_replaced = self._num_spare > 0
        if is_replaced:
            self._num_spare -= 1
            self._arm_node(node)
        for url in engines:
            if is_replaced:
                self._lose_engine(url, self._simulate.notice_s)
            else:
                self._take_out(url, node)
        if node in self._collectors:
            why = f"collector of {node} is lost with its machine"
            self._collectors[node].lose(why, self._simulate.notice_s if is_replaced else None)
        num_left = sum(not state.lost for state in self._health.states)
        if num_left < self._rollout.min_engines:
            self._lose(
                f"{node} failed, and {num_left} engines are left of"
                f" rollout.min_engines={self._rollout.min_engines}"
            )

    def _arm_node(self, node: str) -> None:
        if self._node_mtbf_s:
            self._later(self._draw.expovariate(1 / self._node_mtbf_s), self.lose_node, node)

    def _take_out(self, url: str, node: str) -> None:
        """Lose an engine for good, as its machine is gone."""
        self.num_engines_lost += 1
        self._engines[url].fail()
        self._health.lose(url, f"{node} failed")

    def _lose_engine(self, url: str, notice_s: float = 0.0) -> None:
        """Lose an engine that is started again, `notice_s` later where it has to move.

        On GPUs of ranks it waits for its turn, as often within an hour as ranks are recovered.
        """
        if not self._state(url).healthy:  # lost already, for good or until it is started
            return
        self.num_engines_lost += 1
        self._engines[url].fail()
        state = self._state(url)
        if self._waiting is not None:
            if not self._starts[url].take(self._most_recoveries):
                self._lose(f"{url} failed once more than {self._most_recoveries} times an hour")
                return
            self._waiting[url] = None
        elif state.restarts >= self._rollout.restarts:
            self._lose(
                f"{url} failed, and was started again rollout.restarts={state.restarts} times"
            )
            return
        self._health.note([replace(state, restarts=state.restarts + 1, healthy=False)])
        if self._waiting is not None:
            return
        self._later(notice_s + self._simulate.engine_restart_s, self._return_engine, url)

    async def seat_lost(self) -> bool:
        """Return whether engines wait for the GPUs of ranks; see colocation.EngineMemory."""
        return bool(self._waiting)

    async def start_lost(self) -> None:
        """Start the engines that wait, all at once."""
        await asyncio.sleep(self._simulate.engine_restart_s)
        while self._waiting:
            url, _ = self._waiting.popitem()
            self._return_engine(url)

    def _return_engine(self, url: str) -> None:
        if self._state(url).lost:
            return
        self._engines[url].restart()
        self._health.note([replace(self._state(url), healthy=True)])
        if self._mtbf_s:
            self._arm_engine(url)

    def _state(self, url: str) -> EngineState:
        return next(state for state in self._health.states if state.url == url)


T = TypeVar("T")


class SimulatedRecovery:
    """Implements roles.Recovery."""

    def __init__(
        self,
        clock: VirtualTime,
        failures: Failures,
        costs: RecoveryCosts,
        forget_links: Callable[[], None],
        *,
        is_beside_sampling: bool,
    ) -> None:
        """`is_beside_sampling`: ranks are recovered while engines sample."""
        self._is_beside_sampling = is_beside_sampling
        self._clock = clock
        self._failures = failures
        self._recovery_s = costs.recovery_s
        self._num_in_row = 0
        """Recoveries since a step was trained."""
        self._keep_s = costs.keep_s
        self._forget_links = forget_links

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        def train_and_keep() -> T:
            trained = work()
            self._clock.spend("keep", lambda: self._keep_s)
            return trained

        trained = self.repeat(train_and_keep)
        self._num_in_row = 0
        count = float(self._failures.num_recoveries)
        return trained, {"recovery/keep_seconds": self._keep_s, "recovery/count": count}

    def repeat(self, work: Callable[[], T]) -> T:
        while True:
            if self._failures.ranks_lost.done():
                self._recover()
            self._clock.cut = self._failures.ranks_lost
            try:
                return work()
            except RanksLostError:
                continue
            finally:
                self._clock.cut = None

    def take_back(self) -> bool:
        return False  # no samples are lost here

    def save(self, step: int, work: Callable[[], None]) -> None:
        self.repeat(work)

    def note_done(self, step: int, state: State) -> None: ...

    def _recover(self) -> None:
        self._num_in_row += 1
        seconds = self._recovery_s + backoff_s(self._num_in_row)
        if self._is_beside_sampling:  # nothing else takes time between a loss and this call
            seconds = max(seconds - self._failures.seconds_since_loss, 0.0)
        self._clock.spend("recovery", lambda: seconds)
        self._forget_links()
        self._failures.replace_ranks()
