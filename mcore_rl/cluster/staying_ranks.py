"""Calls ranks that wait for one another. After a loss, ranks that live go on in their processes.

    rank 0   train_step: all_reduce ---- abort: it raises --- clear: no model, no groups --- build
    rank 1   train_step: all_reduce -X                             a new process ----------- build

A rank that died, is stopped, raised an error of its device or does not get out of its call within
LEAVE_S is replaced.
"""

import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

import ray

from mcore_rl.cluster.answers import (
    RankDiedError,
    RankLostError,
    RankStoppedError,
    StoppedRanks,
)
from mcore_rl.cluster.group import ABORT, RankGroup

_log = logging.getLogger(__name__)
LEAVE_S = 10.0
"""How long a rank may take to get out of its call and to drop its model."""
STOPPED_S = 1.0
"""How long the process of such a rank may be stopped."""
_READY_S = 1.0
"""Time to read answers that are there, however long ago they were asked for."""


class StayingRanks(RankGroup):
    """Ranks whose processes may have other workers after a loss; any other error ends them all."""

    stays = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start as RankGroup does."""
        super().__init__(*args, **kwargs)
        self._leaving: dict[int, Any] = {}
        """By rank, a reference to whether it got out of its call."""
        self._left_by_s = 0.0

    def keep_living(self) -> dict[int, Any]:
        """Return by rank the actors whose processes may have other workers; kill all the others.

        Waits until LEAVE_S after the loss, at most.
        """
        futures = {k: left.future() for k, left in self._leaving.items()}
        self._wait_until_left(futures)
        staying = {k: self._actors[k] for k, left in futures.items() if self._has_left(k, left)}
        replaced = [k for k in range(len(self.ranks)) if k not in staying]
        self._kill_ranks(replaced)
        return staying

    def _wait_until_left(self, futures: Mapping[int, Future[Any]]) -> None:
        """Wait for all ranks together, and for none that is stopped."""
        until_s = max(self._left_by_s, time.monotonic() + _READY_S)
        stopped = StoppedRanks(STOPPED_S)
        late = dict(futures)
        while late and (seconds := until_s - time.monotonic()) > 0:
            wait(late.values(), min(seconds, stopped.interval_s))
            late = {k: left for k, left in late.items() if not left.done()}
            known = [self.ranks[k] for k in late if self.ranks[k].pid is not None]
            for k, line in stopped.look(known).items():
                _log.warning("%s", line)
                del late[k]

    def _has_left(self, rank: int, left: Future[Any]) -> bool:
        """Return whether a rank told that it can go on; a line of the log says why not."""
        if not left.done():
            _log.warning("%s did not get out of its call within %g s", self.ranks[rank], LEAVE_S)
            return False
        if error := left.exception():
            line = str(error).strip().splitlines()[-1]
            _log.warning("%s cannot go on in its process: %s", self.ranks[rank], line)
            return False
        return left.result()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None and isinstance(error, RankLostError):
            self._failed = error
            known = error.ranks if isinstance(error, RankDiedError | RankStoppedError) else ()
            self._let_leave(known)
        elif not self._leaving:  # later errors follow from the first one
            super()._fail(error)

    def _let_leave(self, lost: Collection[int]) -> None:
        """Have all ranks but the lost get out of their calls, without waiting; kill the lost."""
        self._kill_ranks(lost)
        self._left_by_s = time.monotonic() + LEAVE_S
        living = {k: actor for k, actor in enumerate(self._actors) if k not in lost}
        for actor in living.values():
            actor.abort.options(concurrency_group=ABORT).remote()
        self._leaving = {k: actor.clear.remote(LEAVE_S) for k, actor in living.items()}

    def _kill_ranks(self, ranks: Collection[int]) -> None:
        for k in ranks:
            ray.kill(self._actors[k])
