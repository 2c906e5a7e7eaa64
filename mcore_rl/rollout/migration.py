"""Moves responses that are under way from an engine with many requests to one with few.

    busy engine --abort one--> what it has drawn --prompt and these tokens--> idle engine

Nothing is drawn twice: the idle engine computes the KV cache of the tokens and goes on.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from uuid import uuid4

from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.rollout.request import EngineAffinity, Request
from mcore_rl.rollout.transport import EngineTransport
from mcore_rl.types import Sample


@dataclass(eq=False)
class UnderWay:
    """A request at an engine, by the name `rid`; `is_moved`: it was asked to end, to go on
    elsewhere.
    """

    engine: EngineLoad
    rid: str
    is_moved: bool = False


class Migration:
    """Picks requests to move, one at a time, while engines differ by `gap` requests or more."""

    def __init__(self, gap: int) -> None:
        """0: nothing moves."""
        self._gap = gap
        self._under_way: dict[str, UnderWay] = {}
        """In the order in which they were posted."""
        self._moving: UnderWay | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self.num_moved = 0

    @property
    def is_on(self) -> bool:
        return self._gap > 0

    def name_request(self, request: Request) -> Request:
        """Return a request under a name of its own, if it may be moved.

        One that ends at texts stays: they may lie across the move. One with images stays, too: a
        placeholder among what was drawn would be taken for a piece of an image elsewhere.
        """
        may_move = self.is_on and not request.stop and not request.prompt.images
        return replace(request, rid=uuid4().hex) if may_move else request

    @contextmanager
    def note(self, request: UnderWay) -> Iterator[None]:
        """Know a request for the length of the block; one without a name is never moved."""
        if request.rid:
            self._under_way[request.rid] = request
        try:
            yield
        finally:
            self._under_way.pop(request.rid, None)
            if self._moving is request:
                self._moving = None

    def maybe_move(self, serving: Sequence[EngineLoad], transport: EngineTransport) -> None:
        """Have the busiest engine end its newest request, if another has that much less to do.

        The newest has the fewest tokens to be computed again.
        """
        if not self.is_on or len(serving) < 2 or self._moving is not None:
            return
        by_load = sorted(serving, key=lambda engine: engine.num_in_flight)
        least, most = by_load[0], by_load[-1]
        if most.num_in_flight - least.num_in_flight < max(self._gap, 2):
            return
        newest = next((r for r in reversed(self._under_way.values()) if r.engine is most), None)
        if newest is not None:
            newest.is_moved = True
            self._moving = newest
            abort = asyncio.create_task(transport.abort(most.address, newest.rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)


def continue_request(request: Request, begun: Sample | None) -> Request:
    """Return the request that goes on with what was drawn, on the engine with the least to do."""
    return replace(request, begun=begun or request.begun, affinity=EngineAffinity(0))
