"""Has ranks and engines outlive the controller that uses them, where Ray outlives it, too.

    controller --asks--> holder --starts--> ranks, engines, keepers of states
        X is lost          |  holds their handles, and the loop's positions after the last step
    next controller <------'  takes them over, unless the recipe or the program is another one

Ray ends processes together with their owner. Where others have started Ray (cluster.address), the
owner is the holder: an actor of its own on the controller's node. It belongs to the controller
that came last. Once that one's job is over for ALONE_S, the holder ends, and all that it started.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import ray
import ray._private.state
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.cluster.answers import RankLostError
from mcore_rl.cluster.session import RayLostError
from mcore_rl.cluster.state_keepers import KeptPlaces
from mcore_rl.planning.slots import RunSlots
from mcore_rl.process.server_keys import ServerKeys

T = TypeVar("T")
NAMESPACE = "mcore_rl"
ALONE_S = 120.0
"""How long ranks and engines wait for another controller."""
LOOK_S = 1.0
ANSWER_S = 60.0
"""How long the holder may take to answer what takes it no time."""
CALLS_AT_ONCE = 16
_LOST = "the process that owns the ranks and engines died or does not answer; they end with it"


@dataclass(frozen=True)
class LivingRun:
    """The processes that a controller takes over from the one before it, as they were after a step.

    made_by    the recipe and the program
    actors     those of "trainer", "critic" and "engines", in order; []: new ones start in the slots
    keepers    where the ranks' states are kept
    positions  what the loop continues from, pickled
    """

    made_by: str
    slots: RunSlots
    keys: ServerKeys
    actors: Mapping[str, Sequence[Any]]
    keepers: KeptPlaces
    positions: bytes

    def list_actors(self) -> list[Any]:
        """Return the actors of all processes that go on."""
        return [*chain(*self.actors.values()), *self.keepers.actors.values()]


class SupersededError(RuntimeError):
    """Another controller has taken the run over."""


class RunHolder:
    """Starts actors for a run, as their owner, and holds what the next controller needs."""

    def __init__(self, alone_s: float) -> None:
        self._alone_s = alone_s
        self._job = ""
        self._actors: list[Any] = []
        self._living: LivingRun | None = None
        threading.Thread(target=self._end_alone, daemon=True).start()

    def lead(self, job: str) -> LivingRun | None:
        """Belong to the controller of this job; return what the one before it had held."""
        self._job = job
        return self._living

    def run(self, job: str, function: Callable[[], T]) -> tuple[T | None, Any]:
        """Return (what a function returns here, None), or (None, the ValueError that it raised)."""
        self._check(job)
        try:
            made = function()
        except ValueError as error:
            return None, error
        if isinstance(made, ActorHandle):
            self._actors.append(made)
        return made, None

    def hold(self, job: str, living: LivingRun | None) -> None:
        self._check(job)
        self._living = living

    def keep_only(self, job: str, actors: Sequence[Any]) -> None:
        """End all processes but these."""
        self._check(job)
        kept = {actor._actor_id for actor in actors}
        for actor in self._actors:
            if actor._actor_id not in kept:
                ray.kill(actor)
        self._actors = list(actors)

    def end(self, job: str) -> None:
        """End this process, and with it all that it started."""
        self._check(job)
        os._exit(0)

    def _check(self, job: str) -> None:
        if job != self._job:
            raise SupersededError(f"job {self._job} has taken over the run of job {job}")

    def _end_alone(self) -> None:
        since_s = None
        while since_s is None or time.monotonic() - since_s < self._alone_s:
            time.sleep(LOOK_S)
            with suppress(RayError, RuntimeError):  # Ray does not answer, so that nothing is known
                is_alone = self._job not in _list_live_jobs()
                since_s = (since_s or time.monotonic()) if is_alone else None
        os._exit(0)


def _list_live_jobs() -> set[str]:
    return {job["JobID"] for job in ray._private.state.jobs() if not job["IsDead"]}


class HeldRun:
    """The holder of a run, for the controller that leads."""

    def __init__(self, holder: Any, start_s: float) -> None:
        """`start_s`: how long the holder may wait for room in the cluster."""
        self._holder = holder
        self._start_s = start_s
        self._job = ray.get_runtime_context().get_job_id()

    def lead(self) -> LivingRun | None:
        """Take the lead; return what the controller before had held, if there was one."""
        return self._ask("lead", ANSWER_S)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in the holder, which owns the actor or the slots that it returns.

        Raises the function's ValueError, and RankLostError if the holder is gone.
        """
        made, error = self._ask("run", self._start_s + ANSWER_S, function)
        if error is not None:
            raise error
        return made

    def hold(self, living: LivingRun | None) -> None:
        """Have the next controller find this; None: it starts anew."""
        self._ask("hold", ANSWER_S, living)

    def keep_only(self, actors: Collection[Any]) -> None:
        """End all processes that the holder started but these."""
        self._ask("keep_only", ANSWER_S, list(actors))

    def end(self) -> None:
        """End the holder and all that it started, unless another controller leads."""
        with suppress(RayLostError, SupersededError):  # it ends before it answers
            self._ask("end", ANSWER_S)

    def kill(self) -> None:
        """Kill the holder, whoever leads."""
        ray.kill(self._holder)

    def _ask(self, method: str, timeout_s: float, *args: object) -> Any:
        call = getattr(self._holder, method).remote
        try:
            return ray.get(call(self._job, *args), timeout=timeout_s)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            # Other threads wait for what this one waits for.
            is_main = threading.current_thread() is threading.main_thread()
            raise (RayLostError if is_main else RankLostError)(_LOST) from error


@contextmanager
def open_holder(
    run: str, made_by: str, start_s: float, *, goes_on: bool
) -> Iterator[tuple[HeldRun, LivingRun | None]]:
    """Yield the holder of the run, and what an earlier controller left; end both with the block.

    run       its name in the cluster
    made_by   the recipe and the program: what others left is ended
    start_s   how long the holder may wait for room in the cluster
    goes_on   False: whatever is left is ended
    """
    held = _find(run, start_s)
    living = None if held is None else _find_living(held)
    if held is not None and not (goes_on and living is not None and living.made_by == made_by):
        held.kill()
        _wait_until_gone(run)
        held = living = None
    if held is None:
        held = _start(run, start_s)
        held.lead()
    try:
        yield held, living
    finally:
        held.end()


def _find_living(held: HeldRun) -> LivingRun | None:
    """Return what an earlier controller left; None as well if the holder does not answer."""
    try:
        return held.lead()
    except RayLostError:
        return None


def _find(run: str, start_s: float) -> HeldRun | None:
    try:
        return HeldRun(ray.get_actor(run, namespace=NAMESPACE), start_s)
    except ValueError:
        return None


def _wait_until_gone(run: str) -> None:
    until_s = time.monotonic() + ANSWER_S
    while _find(run, 0.0) is not None:
        if time.monotonic() > until_s:
            raise RankLostError(f"the processes of an earlier run in {run} do not end")
        time.sleep(0.1)


def _start(run: str, start_s: float) -> HeldRun:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    make: Any = ray.remote(RunHolder)
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": here}
    holder = make.options(**options, name=run, namespace=NAMESPACE, lifetime="detached").remote(
        ALONE_S
    )
    return HeldRun(holder, start_s)
