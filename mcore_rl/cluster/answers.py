"""Waits until several ranks have answered a call, and returns their results or raises one error.

The first failure ends the wait. If a rank died, the error reports the death, and leaves out the
exceptions that the death caused on other ranks. The error also names ranks without an answer whose
processes are stopped.
"""

import asyncio
import concurrent.futures
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.cluster.rank_actor import NotBuilt, Raised
from mcore_rl.device.failures import Failure, find_failure
from mcore_rl.process.lost_samples import SamplesLostError, join_losses
from mcore_rl.process.process_state import STOPPED, describe_state

_READ_S = 5.0
"""Time for another node to report the states of its processes."""


GRACE_S = 3.0
"""How long a death may take to show after another rank raised because of it."""


def find_states(places: Sequence[tuple[Any, str]]) -> list[str]:
    """Return `describe_state` of each process, given (reference to its id, node).

    The text is empty if the process does not tell its id, or its node does not answer.
    """
    own = ray.get_runtime_context().get_node_id()
    by_node: dict[str, dict[int, Any]] = defaultdict(dict)
    for k, (pid, node) in enumerate(places):
        if ray.wait([pid], timeout=0)[0]:
            by_node[node or own][k] = pid
    refs = {_ask(node, pids): list(pids) for node, pids in by_node.items() if node != own}
    answered = ray.wait(list(refs), num_returns=len(refs), timeout=_READ_S)[0] if refs else []
    states = {k: describe_state(_get(pid) or 0) for k, pid in by_node[own].items()}
    for ref in answered:
        states |= zip(refs[ref], _get(ref) or (), strict=False)
    return [states.get(k, "") for k in range(len(places))]


def _ask(node: str, pids: dict[int, Any]) -> Any:
    """Return a reference to the states of the processes of another node."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_describe_all)
    return task.options(scheduling_strategy=there).remote(*pids.values())


def _describe_all(*pids: int) -> list[str]:
    return [describe_state(pid) for pid in pids]


def _get(ref: Any) -> Any:
    """Return the value of a reference that is ready; None if the value is an error."""
    try:
        return ray.get(ref)
    except RayError:
        return None


class RankError(RuntimeError):
    """Ranks raised, died or did not answer in time; the message is for the user."""


class RankLostError(RankError):
    """Ranks are gone or stand still; others in their place may do the same work.

    is_doubtful   unless the program is at fault, which then fails in their place, too
    """

    is_doubtful = False


class RankFaultError(RankLostError):
    """Ranks raised an error of their GPU or of the network."""

    def __init__(self, message: str, *, is_doubtful: bool) -> None:
        super().__init__(message)
        self.is_doubtful = is_doubtful


class RankHungError(RankLostError):
    """Ranks were stopped, or did not answer in time, or waited too long for one another."""


class RankStoppedError(RankHungError):
    """The processes of the ranks with the numbers `ranks` are stopped (SIGSTOP)."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankDiedError(RankLostError):
    """The processes of the ranks with the numbers `ranks` are gone."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Rank:
    """A rank as error messages name it.

    place     describes its coordinate; empty until known
    node      the name of its node; empty if the cluster has no other
    node_id   Ray's id of the node, which is asked about the process
    pid       reference to the process id
    """

    role: str
    index: int
    log_path: Path
    place: str = ""
    node: str = ""
    node_id: str = field(default="", compare=False)
    pid: Any = field(default=None, compare=False, repr=False)

    def name_place(self, place: str) -> "Rank":
        return replace(self, place=place)

    def name_process(self, node_id: str, pid: Any) -> "Rank":
        return replace(self, node_id=node_id, pid=pid)

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.index}"

    def __str__(self) -> str:
        where = ", ".join(filter(None, [self.role, self.where, f"log {self.log_path}"]))
        return f"rank {self.index} ({where})"

    @property
    def where(self) -> str:
        """The coordinate and the node of the rank, as far as they are known."""
        on_node = f"node {self.node}" if self.node else ""
        return ", ".join(filter(None, [self.place, on_node]))


class Answers:
    """The pending answers to one call, one per rank; `wait` or `wait_async` collects them."""

    def __init__(
        self,
        method: str,
        refs: Sequence[ray.ObjectRef],
        ranks: Sequence[Rank],
        deadline_s: float,
        stopped_s: float | None = None,
    ):
        """`stopped_s`: how long the process of a rank may be stopped; None: until the deadline."""
        self._stopped = None if stopped_s is None else StoppedRanks(stopped_s)
        self._method = method
        self._refs = refs
        self._deadline_s = deadline_s
        self._pending = dict(zip(refs, ranks, strict=True))
        self._values: dict[ray.ObjectRef, Any] = {}
        self._raised: list[tuple[Rank, Raised]] = []
        self._died: list[tuple[Rank, str]] = []
        self._until = time.monotonic() + deadline_s

    def wait(self) -> list[Any]:
        """Return the answers in the order of the ranks. Raises RankError, or SamplesLostError."""
        # Not ray.wait: it would turn the SystemExit of a signal handler into exit status 1.
        futures = {ref.future(): ref for ref in self._refs}
        while self._pending and (seconds := self._seconds_left()) > 0:
            first = concurrent.futures.FIRST_COMPLETED
            done, _ = concurrent.futures.wait(futures, self._limit(seconds), first)
            self._collect([futures.pop(future) for future in done])
            self._refuse_stopped()
        return self._result()

    async def wait_async(self) -> list[Any]:
        """Wait as `wait` does, without blocking the event loop."""
        futures = {asyncio.wrap_future(ref.future()): ref for ref in self._refs}
        try:
            while self._pending and (seconds := self._seconds_left()) > 0:
                done, _ = await asyncio.wait(
                    futures, timeout=self._limit(seconds), return_when=asyncio.FIRST_COMPLETED
                )
                for future in done:
                    future.exception()  # asyncio wants it read; _collect reads the reference
                self._collect([futures.pop(future) for future in done])
                if self._stopped is not None and self._stopped.is_due:
                    await asyncio.to_thread(self._refuse_stopped)
        finally:
            for future in futures:
                future.cancel()
        return self._result()

    def _limit(self, seconds: float) -> float:
        """Return how long to wait before looking for stopped ranks again."""
        return seconds if self._stopped is None else min(seconds, self._stopped.interval_s)

    def _refuse_stopped(self) -> None:
        """Raise RankStoppedError if the process of a rank without an answer is stopped for long."""
        if self._stopped is None or not self._stopped.is_due:
            return
        late = [rank for rank in self._pending.values() if rank.pid is not None]
        if lines := self._stopped.look(late):
            text = "\n".join(f"{line} during {self._method}" for line in lines.values())
            raise RankStoppedError(text, list(lines))

    def _seconds_left(self) -> float:
        return 0.0 if self._died else self._until - time.monotonic()

    def _collect(self, ready: Iterable[ray.ObjectRef]) -> None:
        for ref in ready:
            rank = self._pending.pop(ref)
            try:
                value = ray.get(ref)
            except RayError as error:
                if cause := find_death(error):
                    self._died.append((rank, cause))
                    continue
                value = Raised(str(error).strip().splitlines()[-1], "")
            if isinstance(value, NotBuilt):
                self._died.append((rank, "its process was started again"))
                continue
            if isinstance(value, Raised):
                self._raised.append((rank, value))
                self._until = min(self._until, time.monotonic() + GRACE_S)
            self._values[ref] = value

    def _result(self) -> list[Any]:
        if self._died:
            lines = [_describe_death(rank, cause, self._method) for rank, cause in self._died]
            raise RankDiedError("\n".join(lines), [rank.index for rank, _ in self._died])
        if self._raised:
            stopped = self._find_stopped_ranks()
            text = "\n".join([_describe_exceptions(self._raised), *stopped])
            raise RankHungError(text) if stopped else make_error(text, self._raised)
        if self._pending:
            raise RankHungError(self._describe_overdue())
        values = [self._values[ref] for ref in self._refs]
        if losses := [value for value in values if isinstance(value, SamplesLostError)]:
            raise join_losses(losses)
        return values

    def _describe_overdue(self) -> str:
        late = list(self._pending.values())
        names = _name_ranks([rank.index for rank in late])
        lines = [
            f"{late[0].role}: {names} of {len(self._refs)} did not answer {self._method} within"
            f" {self._deadline_s:g} s; where they were is at the end of their logs:"
        ]
        lines += [f"  {rank}" for rank in late]
        return "\n".join([*self._find_stopped_ranks(), *lines])

    def _find_stopped_ranks(self) -> list[str]:
        """Return a line for each rank without an answer whose process does nothing."""
        late = [rank for rank in self._pending.values() if rank.pid is not None]
        states = find_states([(rank.pid, rank.node_id) for rank in late])
        return [f"{rank} {state}" for rank, state in zip(late, states, strict=True) if state]


class StoppedRanks:
    """Tells which ranks were stopped (SIGSTOP) in every look for `stopped_s`."""

    def __init__(self, stopped_s: float) -> None:
        self._stopped_s = stopped_s
        self.interval_s = stopped_s / 4
        self._looked_s = time.monotonic()
        self._since_s: dict[int, float] = {}

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._looked_s + self.interval_s

    def look(self, ranks: Sequence[Rank]) -> dict[int, str]:
        """Look at the processes of `ranks`; return a line for each that was stopped for long.

        By the number of the rank.
        """
        self._looked_s = now = time.monotonic()
        states = find_states([(rank.pid, rank.node_id) for rank in ranks])
        stopped = {
            rank.index: (rank, state)
            for rank, state in zip(ranks, states, strict=True)
            if state == STOPPED
        }
        self._since_s = {k: self._since_s.get(k, now) for k in stopped}
        return {
            k: f"{rank} {state} for {now - self._since_s[k]:.0f} s"
            for k, (rank, state) in stopped.items()
            if now - self._since_s[k] >= self._stopped_s
        }


_OUT_OF_MEMORY = "killed by Ray: the machine is out of memory"


def find_death(error: RayError) -> str | None:
    """Return why a rank's process died, in a few words; None if the error tells of no death."""
    if isinstance(error, OutOfMemoryError):  # which is no RayActorError
        return _OUT_OF_MEMORY
    return find_cause_of_death(str(error)) if isinstance(error, RayActorError) else None


def find_cause_of_death(report: str) -> str:
    """Return the cause that Ray's report on a dead actor gives, in a few words."""
    if "memory" in report and "node was running low" in report:
        return _OUT_OF_MEMORY
    if match := re.search(r"exit code (\d+)", report):
        return f"exit code {match.group(1)}"
    if "node has died" in report or "node died" in report:
        return "its machine left the cluster"
    return "killed, crashed or out of memory"


def _describe_death(rank: Rank, cause: str, method: str) -> str:
    place = f" ({rank.where})" if rank.where else ""
    return f"{rank.name}{place} died ({cause}) during {method}; log {rank.log_path}"


def _describe_exceptions(raised: Sequence[tuple[Rank, Raised]]) -> str:
    """Return the exception of the lowest rank, and which other ranks raised as well."""
    rank, first = min(raised, key=lambda entry: entry[0].index)
    other_indices = sorted(other.index for other, _ in raised if other is not rank)
    also = f"also raised on: {_name_ranks(other_indices)}" if other_indices else ""
    return "\n".join(filter(None, [f"{rank}: {first.summary}", first.frames, also]))


def make_error(text: str, raised: Sequence[tuple[Rank, Raised]]) -> RankError:
    """Return the error for what ranks raised, by what failed: one program error is enough."""
    failures = {find_failure([each.summary, *each.causes]) for _, each in raised}
    if None in failures:
        return RankError(text)
    if failures == {Failure.LOST_PEER}:
        return RankHungError(text)
    return RankFaultError(text, is_doubtful=Failure.HARDWARE not in failures)


def _name_ranks(indices: Sequence[int]) -> str:
    return f"rank{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
