"""Samples near the engines: takes requests for groups, keeps their samples in the node's store.

    controller --begin, cancel, drop--> Collector --HTTP--> engines
        ^                                  |
        +------ events: rows of facts -----+--> SampleStore --columns--> training ranks

Only rows of facts go back to the controller. All methods run on one event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.batches.group_facts import GroupFacts, describe_group
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.process.clock import now_s
from mcore_rl.process.errors import describe_error
from mcore_rl.rollout.client import RolloutClient, RolloutSession
from mcore_rl.rollout.drafts import DraftCounts
from mcore_rl.rollout.engine_health import EngineHealth, Rotation
from mcore_rl.rollout.paces import Paces
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import Prompt, Sample

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupRequest:
    """Asks for `num_samples` samples of a prompt, to be kept as `group`."""

    session: int
    group: int
    prompt: Prompt
    num_samples: int
    sampling: Sampling


@dataclass(frozen=True)
class CollectorCommands:
    """Commands to a collector, which carries them out in the order of the fields.

    sessions   bound of the requests at once, by number of a session that is opened or open
    rotation   which engines get requests; None if nothing has changed
    drop       groups whose samples nobody needs any more
    cancel     groups that are not to be finished
    end        sessions that are closed; their requests are canceled
    """

    sessions: Mapping[int, int] = field(default_factory=dict)
    rotation: Rotation | None = None
    begin: Sequence[GroupRequest] = ()
    cancel: Sequence[int] = ()
    drop: Sequence[int] = ()
    end: Sequence[int] = ()


@dataclass(frozen=True)
class GroupFailure:
    """A group that could not be sampled. `may_retry`: engines failed, not what they answered."""

    group: int
    message: str
    may_retry: bool


@dataclass
class CollectorEvents:
    """Events since the last poll.

    num_done   samples complete, failed or canceled, by session
    paces      tokens and seconds of requests to engines
    drafts     drafts that engines verified
    """

    finished: list[GroupFacts] = field(default_factory=list)
    failed: list[GroupFailure] = field(default_factory=list)
    num_done: dict[int, int] = field(default_factory=dict)
    paces: Paces = field(default_factory=dict)
    drafts: DraftCounts = field(default_factory=dict)


class CollectorLostError(RuntimeError):
    """A collector's process is gone, and its samples with it; the message names it."""


class CollectorCalls(Protocol):
    """A collector, on any node; see Collector. Its calls may raise CollectorLostError."""

    async def submit(self, commands: CollectorCommands) -> None: ...

    async def poll_events(self, wait_s: float, gather_s: float) -> CollectorEvents: ...

    async def hold(self, session: int, cut_off: bool) -> int: ...

    async def resume(self, session: int) -> None: ...

    async def idle_seconds(self) -> float: ...

    async def restart(self, first_group: int) -> bool:
        """Build the collector anew after a CollectorLostError; return False if it is gone for good.

        Its groups with numbers below `first_group` are lost.
        """
        ...


class Collector:
    """Samples groups on the engines of a client, and keeps them in a store."""

    def __init__(
        self,
        client: RolloutClient,
        health: EngineHealth,
        store: SampleStore,
        sample_group: "SampleGroup | None" = None,
    ) -> None:
        """Take the engines' client and the node's store.

        health         what the client asks before each request; commands set it
        sample_group   how the samples of a prompt are drawn; None: each is one response
        """
        self._client = client
        self._sample_group = sample_group or _respond
        self._health = health
        self._store = store
        self._sessions: dict[int, tuple[RolloutSession, AsyncExitStack]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._session_of: dict[int, int] = {}
        self._events = CollectorEvents()
        self._has_events = asyncio.Event()

    async def submit(self, commands: CollectorCommands) -> None:
        """Carry out commands; the groups that they begin go on afterwards."""
        if commands.rotation is not None:
            self._health.follow(commands.rotation)
        for number, max_in_flight in commands.sessions.items():
            if number in self._sessions:
                self._sessions[number][0].resize(max_in_flight)
            else:
                await self._open(number, max_in_flight)
        canceled = set(commands.cancel)
        for request in commands.begin:
            if request.group in canceled:  # a task that never runs would leave traces
                self._note_done(request.session, request.num_samples)
                continue
            self._session_of[request.group] = request.session
            self._tasks[request.group] = asyncio.create_task(self._collect(request))
        for group in canceled & self._tasks.keys():
            self._tasks[group].cancel()
        self._store.drop(commands.drop)
        for number in commands.end:
            await self._close(number)

    async def poll_events(self, wait_s: float, gather_s: float = 0.0) -> CollectorEvents:
        """Return the events since the last call as soon as there are any, after `wait_s` none.

        While groups are open, events are gathered for `gather_s` seconds after the first.
        """
        if not self._has_events.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), wait_s)
        until_s = now_s() + gather_s
        while self._tasks and (seconds := until_s - now_s()) > 0:
            self._has_events.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), seconds)
        self._has_events.clear()
        events = self._events
        events.paces = self._client.take_paces()
        events.drafts = self._client.take_drafts()
        self._events = CollectorEvents()
        return events

    async def hold(self, session: int, cut_off: bool) -> int:
        """Post nothing more and return once no request of the session is under way.

        Returns how many responses were cut off so far; see RolloutSession.hold.
        """
        held, _ = self._sessions[session]
        await held.hold(cut_off=cut_off)
        return held.num_cut_off

    async def resume(self, session: int) -> None:
        await self._sessions[session][0].resume()

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        return await self._client.idle_seconds()

    async def close(self) -> None:
        for number in list(self._sessions):
            await self._close(number)

    async def _open(self, number: int, max_in_flight: int) -> None:
        stack = AsyncExitStack()
        opened = self._client.open(max_in_flight, lambda: self._note_done(number, 1))
        self._sessions[number] = (await stack.enter_async_context(opened), stack)

    def _note_done(self, number: int, num_samples: int) -> None:
        self._events.num_done[number] = self._events.num_done.get(number, 0) + num_samples
        self._has_events.set()

    async def _close(self, number: int) -> None:
        _, stack = self._sessions.pop(number)
        own = [group for group, session in self._session_of.items() if session == number]
        tasks = [self._tasks[group] for group in own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stack.aclose()

    async def _collect(self, request: GroupRequest) -> None:
        session, _ = self._sessions[request.session]
        try:
            samples = await self._sample_group(session, request)
        except RolloutError as error:
            self._events.failed.append(GroupFailure(request.group, str(error), may_retry=True))
        except Exception as error:  # handed on: the controller raises it
            _log.exception("group %d of prompt %d", request.group, request.prompt.index)
            message = str(error) if isinstance(error, ValueError) else describe_error(error)
            self._events.failed.append(GroupFailure(request.group, message, may_retry=False))
        else:
            self._store.put(request.group, samples)
            self._events.finished.append(describe_group(request.group, samples))
        finally:
            del self._tasks[request.group]
            del self._session_of[request.group]
            self._has_events.set()


SampleGroup = Callable[[RolloutSession, GroupRequest], Awaitable[list[Sample]]]


async def _respond(session: RolloutSession, request: GroupRequest) -> list[Sample]:
    """Return single responses to a prompt."""
    return await session.generate([request.prompt], request.num_samples, request.sampling)
