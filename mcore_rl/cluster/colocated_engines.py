"""Starts a lost engine again on the GPUs of trainer ranks, in turn with the ranks.

    engine or node is lost -> the ranks of a lost node are replaced -> before the next weight sync,
    with the ranks offloaded: seat_lost finds the ranks of the engine's GPUs -> start_lost

The new engine has all of its memory. Whoever shares the GPUs calls both (run.roles.colocation).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mcore_rl.cluster.answers import RankDiedError, RankError
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.placement import NoRoomError, Seat, find_places
from mcore_rl.planning.slots import Slot

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Returns:
    """How lost engines are started again.

    find_seats   returns where trainer ranks are, by their places in the recipe's layout; raises
                 RankError while ranks are lost
    are_due      tells whether lost ranks are replaced; otherwise an engine that is lost stays so
    most         starts of each engine within an hour
    """

    find_seats: Callable[[], Awaitable[Mapping[int, Seat]]]
    are_due: Callable[[], bool]
    most: int


class ColocatedEngines(EngineGroup):
    """Engines on the GPUs of trainer ranks; engine e has those of the ranks from e * tp * pp on.

    Once `return_with` was called, an engine whose server or worker dies or does not answer waits
    until it is started again. It joins `health` under its new address.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        log_dir: Path,
        call_timeout_s: float,
        min_engines: int | None = None,
    ) -> None:
        """See EngineGroup."""
        super().__init__(slots, log_dir, call_timeout_s, min_engines=min_engines)
        self._returns: Returns | None = None
        self._why: dict[int, RankError] = {}
        """Engines that are started again -> how they were lost."""
        self._seated: dict[int, tuple[str, ...]] = {}
        """Engines that have a seat -> their GPUs."""
        self._coming: set[int] = set()
        """Those of `_why` that count as coming; the others had no seat at the last look."""

    def return_with(self, returns: Returns) -> None:
        """Have engines that are lost from now on be started again."""
        self._returns = returns

    @property
    def losses(self) -> type[RankError]:
        """See EngineGroup."""
        return RankError if self._may_return() else RankDiedError

    def list_living(self) -> list[str]:
        """Return the urls of the engines that are not lost."""
        engines = range(len(self._slots))
        return [self._find_address(engine).url for engine in engines if engine not in self._lost]

    async def seat_lost(self) -> bool:
        """Find lost engines that can be started now; return whether there are any.

        Raises RankError if trainer ranks are lost, or if an engine cannot be started and fewer than
        min_engines are left.
        """
        waiting = sorted(self._why.keys() - self._left)
        self._seated = {}
        if not waiting or self._returns is None:
            return False
        seats = await self._returns.find_seats()
        for engine in waiting:
            try:
                gpus = await self._find_seat(engine, seats)
            except NoRoomError as no_room:
                self._leave_out(engine, str(no_room))
                continue
            if self._budgets[engine].take(self._returns.most):
                self._seated[engine] = gpus
            else:
                self._leave_out(engine, f"it was started {self._returns.most} times in an hour")
        return bool(self._seated)

    async def start_lost(self) -> list[str]:
        """Start the engines that `seat_lost` found; return the urls of those that are up.

        Raises RankError if one does not start, and fewer than min_engines are left.
        """
        urls = await asyncio.gather(*map(self._return, self._seated))
        return [url for url in urls if url]

    async def _return(self, engine: int) -> str:
        """Start an engine in its seat; return its url, or "" if it does not start."""
        try:
            address = await self._start_again(engine)
        except RankError as error:
            self._why[engine] = error
            self._leave_out(engine, "it did not start")
            return ""
        del self._why[engine]
        self._expect(engine, is_coming=False)
        self._let_join(engine, address)
        return address.url

    def _replace(self, engine: int, error: RankError) -> None:
        if not self._may_return():
            self._go_on_without(engine, error)
            return
        self._why[engine] = error
        self._expect(engine, is_coming=True)
        _log.warning("engine %d is started again before the next weight sync", engine)

    def _may_return(self) -> bool:
        return self._returns is not None and self._returns.are_due()

    def _expect(self, engine: int, *, is_coming: bool) -> None:
        """Count an engine among those that are coming, or no longer."""
        if is_coming != (engine in self._coming):
            self._coming ^= {engine}
            self.health.num_coming += 1 if is_coming else -1

    def _leave_out(self, engine: int, why: str) -> None:
        """Go on without an engine that cannot be started now. Raises RankError if too few are left.

        It is tried again before the next weight sync.
        """
        if engine not in self._coming:
            return
        num_left = len(self._slots) - len(self._lost) + len(self._coming) - 1
        if num_left < self._min_engines:
            raise RankError(f"{self._why[engine]}\nengine {engine} is lost: {why}")
        _log.warning("engine %d is left out: %s; %d engines are left", engine, why, num_left)
        self._expect(engine, is_coming=False)

    async def _find_seat(self, engine: int, seats: Mapping[int, Seat]) -> tuple[str, ...]:
        """Return the GPUs of an engine.

        Raises NoRoomError if one has no rank, or if ranks are not where the engine's process goes.
        """
        slots, spec = self._slots[engine], self._specs[engine]
        nodes = await asyncio.to_thread(find_places, slots)
        num_ranks = spec.tp * spec.pp
        per_node = num_ranks // len(slots)
        gpus: list[str] = []
        for part in range(len(slots)):
            first = engine * num_ranks + part * per_node
            found = [seats.get(place) for place in range(first, first + per_node)]
            there = [seat for seat in found if seat is not None and seat.node == nodes.get(part)]
            if len(there) < per_node:
                ranks = (
                    f"ranks {first} to {first + per_node - 1}" if per_node > 1 else f"rank {first}"
                )
                raise NoRoomError(f"no node has trainer {ranks} and room for the engine beside")
            gpus += chain(*(seat.gpus for seat in there))
        return tuple(gpus)

    async def _find_gpus(self, engine: int) -> Sequence[str]:
        return self._seated[engine]
