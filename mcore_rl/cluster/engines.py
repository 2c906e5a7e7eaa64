"""Runs the SGLang engines of one model as Ray actors, which the run watches.

Servers are restarted within limits, and an engine of a lost node moves to another one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.cluster.answers import Answers, RankDiedError, RankError
from mcore_rl.cluster.engine_servers import (
    combine_states,
    pick_first_of_each_engine,
    plan_servers,
)
from mcore_rl.cluster.group import (
    LIVING_S,
    WATCH_INTERVAL_S,
    WATCHED_CALLS,
    StartActor,
    start_actor,
)
from mcore_rl.cluster.independent_ranks import IndependentRanks
from mcore_rl.cluster.placement import ROOM_S, find_room
from mcore_rl.cluster.rank_actor import node_address
from mcore_rl.config.deadlines import STOPPED_S, answer_s
from mcore_rl.planning.slots import Slot
from mcore_rl.process.clock import now_s
from mcore_rl.process.process_state import RestartBudget
from mcore_rl.rollout.engine_health import EngineHealth, JoinedEngine
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.workers.engine_worker import EngineWorker, RestartCounts

T = TypeVar("T")
_log = logging.getLogger(__name__)
CountRequests = Callable[[EngineAddress], Awaitable[int | None]]
IDLE_LOOKS = 3
"""After so many looks without a request an engine is drained: one may have been on its way."""
MOVES = 3
"""How often the start of an engine is tried that moves."""
NODE_LOSS_SHOWS_S = 5.0
"""How long after the processes of a node died Ray may still take it for alive."""
ROOM_POLL_S = 10.0
"""How often to look for room for an engine whose node is lost, once there was none."""


class EngineGroup:
    """Several engines of one model, each with one worker per machine that it spans.

    `health` exists once the engines are built; `watch` and `look` keep it up to date. Calls raise
    RankError if a worker raises or does not answer in time, if a server died and may not be
    restarted, or if more engines are lost with their nodes than `min_engines` allows.

    With `moves`, an engine whose worker is lost is started again where Ray has moved its slots; it
    joins `health` under its new address.
    """

    health: EngineHealth
    worker_cls: type = EngineWorker

    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        log_dir: Path,
        call_timeout_s: float,
        role: str = "engine",
        weights_stay: bool = False,
        min_engines: int | None = None,
        moves: bool = False,
        start: StartActor = start_actor,
        living: Sequence[Any] = (),
    ) -> None:
        """Start the workers' processes, without waiting for them, unless they are `living`.

        `slots` holds, for each engine, one slot per machine. `role` names workers and logs.
        `weights_stay`: a restarted engine loads its weights from disk and needs no weight sync.
        When workers are lost, the run goes on with `min_engines` engines or more; None: all.
        `moves`: they are started again on other nodes, or on theirs if it lives. `living`: actors
        with servers that an earlier controller of the same run has left.
        """
        self._goes_on = bool(living)
        self._weights_stay = weights_stay
        self._moves = moves
        self._slots = list(slots)
        self._num_started = len(slots)
        self._log_dir = log_dir
        self._free_slots: list[Sequence[Slot]] = []
        """Those of engines that were taken out; engines that are added use them first."""
        self._left: set[int] = set()
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._budgets = [RestartBudget() for _ in slots]
        self.find_home: Callable[[int], int] = lambda engine: 0
        """Returns the number of the collector that asks an engine first."""
        self._min_engines = len(slots) if min_engines is None else min_engines
        self._lost: set[int] = set()
        self._nodes_per_engine = [len(engine_slots) for engine_slots in slots]
        self._has_gpus = any(slot.bundle.get("GPU") for of_engine in slots for slot in of_engine)
        self._restarts = [RestartCounts(0, 0)] * len(slots)
        by_rank = dict(enumerate(living))
        self._group = IndependentRanks(
            role, list(chain(*slots)), log_dir, start=start, living=by_rank
        )
        self._call_timeout_s = call_timeout_s
        self._building: Answers | None = None
        self._addresses: list[EngineAddress] | None = None

    def start_build(
        self,
        specs: Sequence[EngineSpec],
        timeout_s: float,
        max_restarts: int = 0,
        gpu_ids: Sequence[str] = (),
        stopped_s: float = STOPPED_S,
    ) -> None:
        """Begin to start the servers, one spec per engine, unless they are there.

        `wait_built` waits for them.

        `gpu_ids` has a GPU for each rank of each engine; if empty, the engines use the GPUs that
        Ray assigned to their workers. A server that dies later is restarted, up to `max_restarts`
        times an hour, and so is a server with a process that is stopped for `stopped_s`.
        """
        self._specs = list(specs)
        self._max_restarts = max_restarts
        self._startup_timeout_s = timeout_s
        self._limits = (timeout_s, max_restarts, stopped_s, node_address)
        if self._goes_on:
            return
        if max(self._nodes_per_engine) > 1:
            meeting_points = self._group.find_meeting_points(timeout_s)
        else:
            meeting_points = []
        if not gpu_ids and self._has_gpus:
            gpu_ids = list(chain.from_iterable(self._group.gpu_ids(timeout_s)))
        server_specs = plan_servers(specs, self._nodes_per_engine, meeting_points, gpu_ids)
        args = [(spec, engine, *self._limits) for engine, spec in server_specs]
        self._building = self._group.start_build(self.worker_cls, args, answer_s(timeout_s))

    async def _end_last_calls(self) -> None:
        """Have engines that go on end what their controller asked for; replace those that fail."""
        limit_s = min(LIVING_S, self._call_timeout_s)
        ranks = range(len(self._group.ranks))
        answers = await self._group.gather_living(
            ranks, "end_requests", limit_s, deadline_s=limit_s, losses=RankError
        )
        errors = {rank: error for rank, error in answers.items() if isinstance(error, RankError)}
        failed = [e for e, servers in enumerate(self._list_servers()) if errors.keys() & servers]
        for error in errors.values():
            _log.warning("%s", error)
        await asyncio.gather(*(self._start_again(engine) for engine in failed))

    def list_actors(self) -> list[Any]:
        """Return the workers' actors; [] if engines were added or taken out."""
        is_as_started = not self._left and len(self._slots) == self._num_started
        return self._group.actors if is_as_started else []

    def wait_built(self) -> list[EngineAddress]:
        """Wait until the engines are healthy; return their addresses in the order of the specs."""
        if self._addresses is not None:
            return self._addresses
        if self._goes_on:
            asyncio.run(self._end_last_calls())
        else:
            assert self._building is not None, "start_build comes first"
            self._group.finish(self._building)
            self._group.check_environment(self._call_timeout_s)
        server_addresses = self._group.call_all("address", deadline_s=self._call_timeout_s)
        self._addresses = pick_first_of_each_engine(server_addresses, self._nodes_per_engine)
        self.health = EngineHealth([address.url for address in self._addresses], self._weights_stay)
        return self._addresses

    @property
    def is_built(self) -> bool:
        return self._addresses is not None

    @property
    def losses(self) -> type[RankError]:
        """Errors of a worker after which its engine is lost; others are raised."""
        return RankDiedError

    def server_pids(self) -> list[int]:
        """Return the process id of each server, each on its own machine."""
        return self._group.call_all("pid", deadline_s=self._call_timeout_s)

    async def look(self) -> None:
        """Bring `health` up to date now. Raises RankError if a server or its worker is lost."""
        await self._look(self._call_timeout_s)

    def first_of_nodes(self) -> dict[str, Any]:
        """See RankGroup.first_of_nodes."""
        return self._group.first_of_nodes()

    async def add(self, reserve: Callable[[], Sequence[Slot]]) -> EngineAddress:
        """Start one more engine; return its address once it is healthy and has joined.

        reserve   returns slots for it, or raises ValueError if there is no room

        Raises RankError if the engine does not start.
        """
        assert self._addresses is not None, "engines are added once the first ones are built"
        is_reused = bool(self._free_slots)
        slots = self._free_slots.pop() if is_reused else await asyncio.to_thread(reserve)
        engine = len(self._slots)
        log = str(self._log_dir / f"sglang_{engine}.log")
        sharers = self._slots[0][0].sharers
        self._slots.append([replace(slot, sharers=sharers) for slot in slots])
        self._specs.append(replace(self._specs[0], log_path=log))
        self._nodes_per_engine.append(len(slots))
        self._restarts.append(RestartCounts(0, 0))
        self._budgets.append(RestartBudget())
        self._addresses.append(EngineAddress("", log))
        self._lost.add(engine)  # nobody watches it yet
        self._group.add_ranks(self._slots[engine], self._log_dir)
        self.health.num_coming += 1
        try:
            address = await self._start_in_slots(engine)
        except BaseException:
            self._take_out(engine)
            raise
        finally:
            self.health.num_coming -= 1
        self._let_join(engine, address)
        return address

    async def drain(self, engine: int, count: CountRequests, deadline_s: float) -> None:
        """Take an engine out once it has no request left, at the latest after `deadline_s`.

        count   returns how many requests an engine has; None: it does not tell

        Requests that it still has then go on elsewhere, from their beginning. Raises ValueError if
        there is no such engine, or if too few would be left.
        """
        url = self._find_to_drain(engine)
        with self.health.drain(url):
            address = self._find_address(engine)
            until_s = now_s() + deadline_s
            num_idle = 0
            while num_idle < IDLE_LOOKS and now_s() < until_s:
                await asyncio.sleep(WATCH_INTERVAL_S)
                num_idle = num_idle + 1 if await count(address) == 0 else 0
            while self.health.takes_weights:
                await asyncio.sleep(WATCH_INTERVAL_S)
            if engine in self._lost:
                raise ValueError(f"engine {engine} was lost while it was drained")
            self._take_out(engine)
        _log.warning("engine %d at %s was taken out", engine, url)

    def _find_to_drain(self, engine: int) -> str:
        """Return the url of an engine that may be taken out."""
        if not 0 <= engine < len(self._slots) or engine in self._left:
            there = [e for e in range(len(self._slots)) if e not in self._left]
            raise ValueError(f"there is no engine {engine}: the run has {there}")
        if engine in self._lost:
            raise ValueError(f"engine {engine} is lost, or being started: nothing is left to drain")
        url = self._find_address(engine).url
        if url in self.health.draining:
            raise ValueError(f"engine {engine} is being drained already")
        others = [each for each in self.health.serving if each != url]
        if len(others) < self._min_engines:
            raise ValueError(
                f"without engine {engine}, {len(others)} engines would serve, fewer than"
                f" rollout.min_engines={self._min_engines}: add one first, and wait for its sync"
            )
        return url

    def _take_out(self, engine: int) -> None:
        """End an engine for good, and keep its slots for another."""
        self._lost.add(engine)
        self._left.add(engine)
        if url := self._find_address(engine).url:
            self.health.leave(url)
        self._group.kill_ranks(self._list_servers()[engine])
        self._free_slots.append(self._slots[engine])

    def _find_address(self, engine: int) -> EngineAddress:
        assert self._addresses is not None, "engines are asked for once they are built"
        return self._addresses[engine]

    def describe(self) -> list[tuple[int, str, str, str]]:
        """Return (number, url, node, state) of each engine that has not been taken out."""
        described = []
        for engine, servers in enumerate(self._list_servers()):
            if engine in self._left:
                continue
            url = self._find_address(engine).url
            state = f"out: {self.health.why_out(url)}" if self.health.why_out(url) else "serves"
            if engine in self._moving or not url:
                state = "is being started"
            described.append((engine, url or "-", self._name_nodes(servers), state))
        return described

    async def watch(self) -> None:
        """Look again and again; never return, but raise RankError as `look` does."""
        while True:
            await self._look(WATCHED_CALLS * self._call_timeout_s)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _look(self, deadline_s: float) -> None:
        self._take_moved()
        engines = [e for e in range(len(self._nodes_per_engine)) if e not in self._lost]
        servers = self._list_servers()
        answers = await self._group.gather_living(
            [rank for engine in engines for rank in servers[engine]],
            "check",
            self._restarts,
            self.health.takes_weights,
            deadline_s=deadline_s,
            losses=self.losses,
        )
        for engine in engines:
            states = [answers[rank] for rank in servers[engine]]
            lost = [state for state in states if isinstance(state, RankError)]
            if lost:
                self._lose(engine, servers[engine], lost[0])
            else:
                [state] = combine_states(states, [len(states)])
                fewest = min(server.restarts for server in states)
                self._restarts[engine] = RestartCounts(fewest, state.restarts)
                self.health.note([state])

    def _take_moved(self) -> None:
        """Forget moves that have ended; raise the error of one after which too few are left."""
        for engine, moving in list(self._moving.items()):
            if moving.done():
                del self._moving[engine]
                moving.result()

    def _lose(self, engine: int, servers: Sequence[int], error: RankError) -> None:
        """Take out an engine whose worker is lost; see _replace."""
        if engine in self._lost:  # another watch has seen it
            return
        self._lost.add(engine)
        self._group.kill_ranks(servers)
        assert self._addresses is not None, "engines are watched once they are built"
        self.health.lose(self._addresses[engine].url, str(error))
        self._replace(engine, error)

    def _replace(self, engine: int, error: RankError) -> None:
        """Begin to move a lost engine, or go on without it.

        Raises `error` if fewer than min_engines would be left.
        """
        if self._moves and self._budgets[engine].take(self._max_restarts):
            self.health.num_coming += 1
            self._moving[engine] = asyncio.create_task(self._move(engine, error))
        else:
            self._go_on_without(engine, error)

    def _go_on_without(self, engine: int, error: RankError, why: str = "") -> None:
        num_left = len(self._slots) - len(self._lost)
        if num_left < self._min_engines:
            raise error
        _log.warning("engine %d is left out%s; %d engines are left", engine, why, num_left)

    async def _move(self, engine: int, error: RankError) -> None:
        """Start an engine where Ray has moved its slots, or as soon as Ray finds room for them.

        Raises `error` if that fails, and fewer than min_engines are left.
        """
        slots = self._slots[engine]
        if not await find_room(slots, ROOM_S):
            self.health.num_coming -= 1
            why = f": no node has had room for it for {ROOM_S:g} s; it is started once one has"
            self._go_on_without(engine, error, why)
            while not await find_room(slots, 0.0):
                await asyncio.sleep(ROOM_POLL_S)
            self.health.num_coming += 1
        try:
            address = await self._try_again(engine)
        except RankError as failed:
            self._go_on_without(engine, failed, f", as it did not start elsewhere: {failed}")
        else:
            self._let_join(engine, address)
        finally:
            self.health.num_coming -= 1

    async def _try_again(self, engine: int) -> EngineAddress:
        """Start an engine in its slots, again if they turn out to be on a lost node, too.

        Ray knows of the loss of a node a moment after its processes died.
        """
        for _ in range(MOVES - 1):
            try:
                return await self._start_again(engine)
            except RankDiedError as died:
                _log.warning("%s; engine %d moves once more", died, engine)
            await asyncio.sleep(NODE_LOSS_SHOWS_S)
            await find_room(self._slots[engine], ROOM_S)
        return await self._start_again(engine)

    async def _start_again(self, engine: int) -> EngineAddress:
        """Start an engine in its slots; return its address once it is healthy. Raises RankError."""
        ranks = self._list_servers()[engine]
        timeout_s = self._startup_timeout_s
        before = self._name_nodes(ranks)
        self._group.replace_ranks(dict(zip(ranks, self._slots[engine], strict=True)))
        for rank in ranks:
            await self._group.find_node(rank, timeout_s)
        now = self._name_nodes(ranks)
        where = f"moves from {before} to {now}" if now != before else f"is started again on {now}"
        _log.warning("engine %d %s", engine, where)
        return await self._start_in_slots(engine)

    async def _start_in_slots(self, engine: int) -> EngineAddress:
        """Start an engine in processes that have no worker yet; see _start_again."""
        ranks = self._list_servers()[engine]
        timeout_s = self._startup_timeout_s
        for rank in ranks:
            await self._group.find_node(rank, timeout_s)
        points = []
        if len(ranks) > 1:
            points = await self._group.ask_meeting_points(ranks, timeout_s)
        gpu_ids = await self._find_gpus(engine)
        servers = plan_servers([self._specs[engine]], [len(ranks)], points, gpu_ids)
        builds = [
            self._group.build_one(
                rank, self.worker_cls, (spec, engine, *self._limits), answer_s(timeout_s)
            )
            for rank, (_, spec) in zip(ranks, servers, strict=True)
        ]
        await asyncio.gather(*builds)
        return await self._group.call_one_async(
            ranks[0], "address", deadline_s=self._call_timeout_s
        )

    async def _find_gpus(self, engine: int) -> Sequence[str]:
        """Return the GPUs of an engine's processes; empty if nodes have none."""
        if not self._has_gpus:
            return ()
        ranks = self._list_servers()[engine]
        return list(chain(*await self._group.ask_gpus(ranks, self._startup_timeout_s)))

    def _let_join(self, engine: int, address: EngineAddress) -> None:
        """Have an engine that was started again be watched and linked, at its new address."""
        assert self._addresses is not None
        before = self._addresses[engine].url
        self._addresses[engine] = address
        self._restarts[engine] = RestartCounts(0, 0)
        self._lost.discard(engine)
        self.health.leave(before)
        self.health.join(
            JoinedEngine(address, self.find_home(engine)), "it has no weights of a sync yet"
        )
        _log.warning("engine %d is up at %s; it serves after a weight sync", engine, address.url)

    def _name_nodes(self, ranks: Sequence[int]) -> str:
        """Return the nodes of an engine's servers as messages name them."""
        nodes = dict.fromkeys(self._group.ranks[rank].node for rank in ranks)
        return " and ".join(f"node {node}" if node else "this node" for node in nodes)

    def _list_servers(self) -> list[range]:
        """Return the ranks of each engine's workers."""
        firsts = [0, *accumulate(self._nodes_per_engine)]
        return [range(first, end) for first, end in pairwise(firsts)]
