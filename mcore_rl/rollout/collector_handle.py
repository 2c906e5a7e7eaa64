"""One collector as the pool sees it: what waits to be submitted, and the groups that it samples."""

import asyncio
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

from mcore_rl.rollout.collector import (
    CollectorCalls,
    CollectorCommands,
    CollectorLostError,
    GroupRequest,
)
from mcore_rl.rollout.engine_health import Rotation
from mcore_rl.rollout.request import Sampling
from mcore_rl.types import GroupLease, Prompt, StoredSample


@dataclass(eq=False)
class PendingGroup:
    """A group whose samples are not there yet.

    session   number of the PoolSession that asked for the group
    lease     where the group will be kept; None until a collector has it
    """

    session: int
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    future: "asyncio.Future[list[StoredSample]]"
    lease: GroupLease | None = None


class CollectorHandle:
    """Submits commands to a collector, and keeps account of its groups.

    `flush` submits the commands that came up since it was called last, all of them together.
    """

    def __init__(self, collector: CollectorCalls, num_engines: int) -> None:
        """`num_engines`: those that the collector asks first."""
        self.collector = collector
        self.num_engines = num_engines
        self.dropped: deque[int] = deque()
        """Groups that nobody refers to any more; filled by finalizers, in any thread."""
        self.may_send = asyncio.Event()
        self._lock = asyncio.Lock()
        self._lost_cut_offs: Counter[int] = Counter()
        """By session, what `hold` had cut off when the collector was lost."""
        self._cut_offs: dict[int, int] = {}
        self.forget()
        self.is_up = True
        """False from a loss until the collector is there again, or for good."""
        self.is_gone = False
        """True if it never comes back."""

    def forget(self) -> None:
        """Drop all groups and what waits: the collector that they were for is gone."""
        self.is_up = False
        self.groups: dict[int, PendingGroup] = {}
        self.open_samples: Counter[int] = Counter()
        """Samples that were asked for and are not done, by session."""
        self._sessions: dict[int, int] = {}
        self._begin: list[GroupRequest] = []
        self._cancel: list[int] = []
        self._end: list[int] = []
        self.dropped.clear()
        self._known: Rotation | None = None
        self._lost_cut_offs.update(self._cut_offs)
        self._cut_offs = {}

    def leave(self) -> None:
        """Count as gone for good."""
        self.is_gone = True

    def open(self, session: int, max_in_flight: int) -> None:
        """Have a session opened; an open one gets another bound."""
        self._sessions[session] = max_in_flight

    def end(self, session: int) -> None:
        self._end.append(session)
        self.may_send.set()

    def begin(self, group: PendingGroup, lease: GroupLease) -> None:
        """Have a group sampled, to be kept as `lease`."""
        group.lease = lease
        self.groups[lease.group] = group
        self.open_samples[group.session] += group.num_samples
        request = GroupRequest(
            group.session, lease.group, group.prompt, group.num_samples, group.sampling
        )
        self._begin.append(request)
        self.may_send.set()

    def cancel(self, number: int) -> None:
        """Cancel a group; one that is not open is left alone."""
        if self.groups.pop(number, None) is not None:
            self._cancel.append(number)
            self.may_send.set()

    async def flush(self, rotation: Rotation) -> None:
        """Submit the commands that wait, and `rotation` if it has changed."""
        async with self._lock:
            self.may_send.clear()
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            changed = None if rotation == self._known else rotation
            commands = CollectorCommands(
                self._sessions, changed, self._begin, self._cancel, dropped, self._end
            )
            self._known = rotation
            self._sessions = {}
            self._begin = []
            self._cancel = []
            self._end = []
            await self.collector.submit(commands)

    async def hold(self, session: int, cut_off: bool) -> int:
        """Hold a session here; return the responses that were cut off here so far.

        A collector that is lost holds everything.
        """
        if self.is_up:
            with suppress(
                CollectorLostError
            ):  # the pool's own calls meet the loss and deal with it
                self._cut_offs[session] = await self.collector.hold(session, cut_off)
        return self._lost_cut_offs[session] + self._cut_offs.get(session, 0)

    async def resume(self, session: int) -> None:
        """Resume a session here; one that returns from a loss learns it then."""
        if self.is_up:
            with suppress(CollectorLostError):
                await self.collector.resume(session)

    async def idle_seconds(self) -> float | None:
        """Return the seconds without a request so far; None if the collector is lost."""
        if self.is_up:
            with suppress(CollectorLostError):
                return await self.collector.idle_seconds()
        return None
