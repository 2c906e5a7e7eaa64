"""Calls all ranks of one role as one object, and returns their answers or raises one error.

If one rank fails, all end, as they wait for one another; see independent_ranks.py for others.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.cluster.answers import (
    GRACE_S,
    Answers,
    Rank,
    RankError,
    RankHungError,
    RankLostError,
)
from mcore_rl.cluster.environment import compare_environments
from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.cluster.rank_actor import RankActor
from mcore_rl.planning.slots import Slot
from mcore_rl.process.cores import THREADS
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.signals import OverdueStopError, TerminatedError, hold_signals

BULK = "bulk"
"""Ray's concurrency group for calls that move much data, so that other calls need not wait."""
BULK_THREADS = 8
ABORT = "abort"
"""Ray's concurrency group for RankActor.abort, which runs beside a call."""
T = TypeVar("T")
WATCH_INTERVAL_S = 1.0
LIVING_S = 60.0
"""How long processes that an earlier controller left may be busy with its last call."""
WATCHED_CALLS = 3
"""A busy rank answers a health check late: after at most so many of its calls."""


@dataclass(frozen=True)
class ActorPlan:
    """A RankActor, which answers up to `threads` calls at once.

    With several threads it has additional ones for calls of the group BULK.

    name         Ray titles the process after it: `ps` shows ray::trainer_rank0
    threads_set  the number of threads that the user has set, which applies to every process
    folder       the controller's working folder
    stays        a thread beside that of its calls can end these, so that the process goes on
    returns      if the process dies, Ray restarts it without its worker; the handle stays valid
    """

    name: str
    log_path: str
    slot: Slot
    runtime_env: Mapping[str, Any] | None
    threads: int
    threads_set: str | None
    folder: str
    returns: bool = False
    stays: bool = False

    @staticmethod
    def make(
        rank: Rank,
        slot: Slot,
        runtime_env: Mapping[str, Any] | None,
        threads: int,
        returns: bool = False,
        stays: bool = False,
    ) -> "ActorPlan":
        return ActorPlan(
            name=f"{rank.role}_rank{rank.index}",
            log_path=str(rank.log_path),
            slot=slot,
            runtime_env=runtime_env,
            threads=threads,
            threads_set=os.environ.get(THREADS),
            folder=os.getcwd(),
            returns=returns,
            stays=stays,
        )


StartActor = Callable[[ActorPlan], Any]


def start_actor(plan: ActorPlan) -> Any:
    """Return the handle of a new RankActor, which ends together with this process."""
    slot = plan.slot
    actor_cls: Any = type(plan.name, (RankActor,), {})
    options: dict[str, Any] = {
        "num_cpus": slot.bundle["CPU"],
        "num_gpus": slot.bundle.get("GPU", 0),
        "max_concurrency": plan.threads,
        "max_restarts": -1 if plan.returns else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, slot.bundle_index),
    }
    if plan.runtime_env is not None:
        options["runtime_env"] = dict(plan.runtime_env)
    make_remote: Any = ray.remote
    beside = {BULK: BULK_THREADS} if plan.threads > 1 else {}
    beside |= {ABORT: 1} if plan.stays else {}
    if beside:
        make_remote = make_remote(concurrency_groups=beside)
    cores = (slot.sharers, plan.threads_set) if slot.sharers else None
    arguments = plan.log_path, cores, plan.folder, plan.stays
    return make_remote(actor_cls).options(**options).remote(*arguments)


class RankGroup:
    """One actor process per slot, each around one worker object.

    After a failure the whole group is killed, because the other ranks would hang in a collective.
    After a SamplesLostError, which all ranks raise before they begin, the ranks go on. A signal
    waits until a call is on its way to all ranks: those that have it would wait for the others.
    """

    stays = False
    """Whether processes that live may go on after a failure; see staying_ranks.py."""

    def __init__(
        self,
        role: str,
        slots: Sequence[Slot],
        log_dir: Path,
        runtime_envs: Mapping[int, Mapping[str, Any]] | None = None,
        threads: int = 1,
        returns: bool = False,
        stopped_s: float | None = None,
        start: StartActor = start_actor,
        living: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """Start the processes, without waiting for them, unless they are `living`.

        Rank k logs to <log_dir>/<role>_rank<k>.log. `runtime_envs` has Ray's runtime environments
        by rank. Each rank answers up to `threads` calls at once. `returns`: Ray restarts a process
        that died. `stopped_s`: how long a process may be stopped within a call; None: until its
        deadline. `living`: by rank, actors that are there already.
        """
        self._stopped_s = stopped_s
        self._start = start
        envs = runtime_envs or {}
        self.role = role
        names = name_nodes() if slots else {}
        self.ranks = [
            Rank(role, k, log_dir / f"{role}_rank{k}.log", node=names.get(slot.node, ""))
            for k, slot in enumerate(slots)
        ]
        starts = {
            rank.index: ActorPlan.make(
                rank, slot, envs.get(rank.index), threads, returns, self.stays
            )
            for rank, slot in zip(self.ranks, slots, strict=True)
            if rank.index not in living
        }
        self._actors = [
            start(starts[k]) if k in starts else living[k] for k in range(len(self.ranks))
        ]
        self.ranks = [
            rank.name_process(slot.node, actor.pid.remote())
            for rank, slot, actor in zip(self.ranks, slots, self._actors, strict=True)
        ]
        self._failed: BaseException | None = None
        self._dp_ranks: list[int] = []
        self._owners: list[int] = []

    def start_build(
        self, worker_cls: type, args_per_rank: Sequence[tuple[Any, ...]], deadline_s: float
    ) -> Answers:
        """Start making worker_cls(*args) on every rank; pass the returned answers to `finish`."""
        pairs = zip(self._actors, args_per_rank, strict=True)
        refs = [actor.build.remote(deadline_s, worker_cls, *args) for actor, args in pairs]
        return self._expect("start-up", refs, deadline_s)

    def build(
        self, worker_cls: type, args_per_rank: Sequence[tuple[Any, ...]], deadline_s: float
    ) -> None:
        self.finish(self.start_build(worker_cls, args_per_rank, deadline_s))

    def finish(self, answers: Answers) -> list[Any]:
        """Wait for `answers` and return them; on an error, kill the group before raising it.

        After Ctrl-C, SIGTERM and an overdue stop the ranks go on, and may complete what they write.
        """
        try:
            return answers.wait()
        except (SamplesLostError, KeyboardInterrupt, TerminatedError, OverdueStopError):
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def call_all(
        self, method: str, *args: object, deadline_s: float, **kwargs: object
    ) -> list[Any]:
        """Make the same call on every rank; return the answers in rank order. Raises RankError."""
        return self.finish(self._send_all(method, args, kwargs, deadline_s))

    def call_each(
        self, method: str, args_per_rank: Sequence[Sequence[object]], *, deadline_s: float
    ) -> list[Any]:
        """Call `method` on every rank as `call_all` does, with arguments by rank."""
        pairs = zip(self._actors, args_per_rank, strict=True)
        with hold_signals():
            refs = [actor.call.remote(deadline_s, method, *args) for actor, args in pairs]
        return self.finish(self._expect(method, refs, deadline_s))

    async def call_one_async(
        self,
        rank: int,
        method: str,
        *args: object,
        deadline_s: float,
        stopped_s: float | None = None,
    ) -> Any:
        """Make a call on one rank, without blocking the event loop; return its answer.

        stopped_s   how long its process may be stopped meanwhile; None: until the deadline
        """
        if self._failed is not None:
            raise self._failed
        ref = self._actors[rank].call.remote(deadline_s, method, *args)
        try:
            answers = Answers(method, [ref], [self.ranks[rank]], deadline_s, stopped_s)
            return (await answers.wait_async())[0]
        except RankError as error:
            self._fail(error)
            raise

    def find_loss(self, wait_s: float) -> RankLostError | None:
        """Return why the ranks are lost, or None if they live or raised an error of their own.

        A death shows within `wait_s`.
        """
        if self._failed is None:
            refs = [actor.pid.remote() for actor in self._actors]
            try:
                Answers("a health check", refs, self.ranks, wait_s).wait()
            except RankHungError:  # a rank is busy, and answers after its call
                return None
            except RankError as error:
                self._fail(error)
        return self._failed if isinstance(self._failed, RankLostError) else None

    def first_of_nodes(self) -> dict[str, Any]:
        """Return node name -> an actor on the node; {} if the cluster has a single node."""
        firsts: dict[str, Any] = {}
        for rank, actor in zip(self.ranks, self._actors, strict=True):
            if rank.node:
                firsts.setdefault(rank.node, actor)
        return firsts

    @property
    def actors(self) -> list[Any]:
        """The actors of the ranks, for processes that call them directly."""
        return list(self._actors)

    async def call_all_async(
        self, method: str, *args: object, deadline_s: float, **kwargs: object
    ) -> list[Any]:
        """Call as `call_all` does, without blocking the event loop."""
        try:
            return await self._send_all(method, args, kwargs, deadline_s).wait_async()
        except (SamplesLostError, asyncio.CancelledError):
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def find_coordinates(self, deadline_s: float) -> None:
        """Ask each rank for its coordinate; must be called once before `dispatch`.

        `owns_output` is true on exactly one rank of each data-parallel coordinate `dp`.
        """
        coordinates = self.call_all("coordinate", deadline_s=deadline_s)
        owners = {c.dp: k for k, c in enumerate(coordinates) if c.owns_output}
        self._dp_ranks = [c.dp for c in coordinates]
        assert sorted(owners) == sorted(set(self._dp_ranks)) == list(range(len(owners))), (
            coordinates
        )
        self._owners = [owners[dp] for dp in range(len(owners))]
        self.ranks = [
            r.name_place(_describe_coordinate(c))
            for r, c in zip(self.ranks, coordinates, strict=True)
        ]

    @property
    def dp_size(self) -> int:
        return len(self._owners)

    def dispatch(
        self,
        method: str,
        per_dp_args: Sequence[object],
        *args: object,
        deadline_s: float,
        **kwargs: object,
    ) -> list[Any]:
        """Call as `dispatch_to_all`; return the answers of ranks that own an output, by dp."""
        answers = self.dispatch_to_all(method, per_dp_args, *args, deadline_s=deadline_s, **kwargs)
        return [answers[rank] for rank in self._owners]

    def dispatch_to_all(
        self,
        method: str,
        per_dp_args: Sequence[object],
        *args: object,
        deadline_s: float,
        **kwargs: object,
    ) -> list[Any]:
        """Call method(per_dp_args[dp], *args, **kwargs) on every rank; return all answers.

        Each argument is put into Ray's object store once, however many ranks of its data-parallel
        coordinate read it. Raises ValueError if there are more or fewer arguments than coordinates,
        and RankError as `call_all` does.
        """
        if len(per_dp_args) != self.dp_size:
            raise ValueError(
                f"{self.role}.{method}: {len(per_dp_args)} slices for data-parallel size"
                f" {self.dp_size}"
            )
        slices = [ray.put(value) for value in per_dp_args]
        pairs = zip(self._actors, self._dp_ranks, strict=True)
        with hold_signals():
            refs = [
                actor.call.remote(deadline_s, method, slices[dp], *args, **kwargs)
                for actor, dp in pairs
            ]
        return self.finish(self._expect(method, refs, deadline_s))

    async def watch(
        self,
        method: str | None = None,
        *args: object,
        call_timeout_s: float,
        note: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """Never return; raise RankError once a rank's process is gone or its `method` raises.

        Without `method` only the processes are watched. `note` gets the answers of each round. A
        busy rank may answer late, by up to WATCHED_CALLS calls of `call_timeout_s` each.
        """
        deadline_s = WATCHED_CALLS * call_timeout_s
        while True:
            if method is None:
                refs = [actor.pid.remote() for actor in self._actors]
            else:
                refs = [actor.call.remote(deadline_s, method, *args) for actor in self._actors]
            try:
                answers = await self._expect("a health check", refs, deadline_s).wait_async()
            except RankError as error:
                # An earlier failure killed the missing ranks: report that failure.
                if isinstance(self._failed, RankError):
                    raise self._failed from None
                self._fail(error)
                raise
            if note is not None:
                note(answers)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def pids(self, deadline_s: float = 60.0) -> list[int]:
        """Return process ids by rank, each on its own machine."""
        refs = [actor.pid.remote() for actor in self._actors]
        return self.finish(self._expect("pid", refs, deadline_s))

    def find_nodes(self, deadline_s: float) -> list[str]:
        """Return Ray's ids of the nodes where the ranks are, which may not be those of the start.

        Messages name them from now on.
        """
        refs = [actor.node_id.remote() for actor in self._actors]
        ids = self.finish(self._expect("start-up", refs, deadline_s))
        names = name_nodes()
        self.ranks = [
            replace(rank, node_id=node, node=names.get(node, ""))
            for rank, node in zip(self.ranks, ids, strict=True)
        ]
        return ids

    def find_meeting_points(self, deadline_s: float) -> list[tuple[str, int]]:
        """Return, by rank, (address, free port) of its machine for ranks to meet at."""
        refs = [actor.find_meeting_point.remote() for actor in self._actors]
        return self.finish(self._expect("start-up", refs, deadline_s))

    def gpu_ids(self, deadline_s: float) -> list[tuple[str, ...]]:
        """Return, by rank, the GPUs of its machine that Ray assigned to it."""
        refs = [actor.gpu_ids.remote() for actor in self._actors]
        return self.finish(self._expect("start-up", refs, deadline_s))

    def check_environment(self, deadline_s: float) -> None:
        """Compare the ranks' environment variables with the controller's.

        Logs a warning with the ranks and variables that differ. Raises ValueError if trainer and
        engines could not exchange weights because of a difference.
        """
        refs = [actor.environment.remote() for actor in self._actors]
        environments = self.finish(self._expect("start-up", refs, deadline_s))
        compare_environments({str(r): e for r, e in zip(self.ranks, environments, strict=True)})

    def kill(self) -> None:
        """Kill the processes and their children. Safe to repeat."""
        for actor in self._actors:
            ray.kill(actor)

    def _send_all(
        self, method: str, args: tuple[object, ...], kwargs: dict[str, object], deadline_s: float
    ) -> Answers:
        with hold_signals():
            refs = [
                actor.call.remote(deadline_s, method, *args, **kwargs) for actor in self._actors
            ]
        return self._expect(method, refs, deadline_s)

    def _expect(self, method: str, refs: list[ray.ObjectRef], deadline_s: float) -> Answers:
        if self._failed is not None:
            raise RankError(f"{self.role}: {method} after the ranks were stopped: {self._failed}")
        return Answers(method, refs, self.ranks, deadline_s, self._stopped_s)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, SystemExit):  # On SystemExit, Ray is ending or dead.
            self.kill()
        if self._failed is None:  # later errors follow from the first one
            self._failed = error


async def guard(work: Awaitable[T], *watches: Awaitable[None]) -> T:
    """Return the result of `work`; if one of `watches` raises, cancel `work` and raise its error.

    If `work` raises first, watches get GRACE_S more seconds, because a dead process explains a
    lost connection.
    """
    task = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait([task, *watching], return_when=asyncio.FIRST_COMPLETED)
        if watching and task in done and task.exception() is not None:
            done, _ = await asyncio.wait(
                watching, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
        for watch in done - {task}:
            watch.result()
        return await task
    finally:
        for each in (task, *watching):
            each.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)


def name_nodes() -> dict[str, str]:
    """Return Ray's id of each node -> its name; {} if the cluster has a single node."""
    nodes = list_alive_nodes()
    return {node.id: node.name for node in nodes} if len(nodes) > 1 else {}


def _describe_coordinate(coordinate: object) -> str:
    parts = [(name, getattr(coordinate, name, None)) for name in ("dp", "tp", "pp", "cp", "ep")]
    return " ".join(f"{name} {value}" for name, value in parts if value is not None)
