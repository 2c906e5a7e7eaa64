"""An event loop in virtual time, and machines whose processes share cores.

The clock of the loop jumps to the next event instead of waiting for it. The controller's coroutines
run on the loop unchanged. The loop also counts the real CPU seconds of its callbacks, by the owner
that their context names: so what the controller itself costs is known apart from the collectors and
engines that one process simulates.

A machine is a fluid: the more of its processes work, the slower they are.

    processes that work     2 on 2 cores    3 on 2 cores    2 on 2 cores
    speed of each                1               2/3             1
    seconds on a WorkClock  ------------|-- -- -- -- -- -- |-----------

A WorkClock counts the seconds of work of processes that go on together, and its alarms ring at such
times. It runs as fast as the slowest of them, and its speed changes when anybody begins or ends to
work on their machines.

Peak rates of accelerators are of the vendors' data sheets, for dense bfloat16. The shares of them
that kernels reach are assumptions; a run on GPUs would measure them (docs/simulate.md). The shares
of a CPU are of one core, measured on a laptop.
"""

import asyncio
import math
import selectors
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

CONTROLLER = "controller"
CLOCK_RESOLUTION_S = 1e-9
"""Events so close are at once."""
_owner: ContextVar[str] = ContextVar("owner", default=CONTROLLER)


class SimulationStuckError(RuntimeError):
    """Something is waited for, but no event will ever come."""


class _JumpingSelector(selectors.DefaultSelector):
    """Finds no file ready; the time that it should wait passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.resolution_s = CLOCK_RESOLUTION_S
        """No less than the clock can show: asyncio runs an event only before now + resolution."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise SimulationStuckError("no simulated event is left, but the controller still waits")
        if timeout > 0:  # a tiny timeout after a long time must move the clock nevertheless
            self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
            self.resolution_s = max(CLOCK_RESOLUTION_S, 2 * math.ulp(self.now_s))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        """Real seconds that callbacks took, by owner."""
        self.num_events = 0

    def time(self) -> float:
        return self._jumping.now_s

    @property
    def _clock_resolution(self) -> float:
        return self._jumping.resolution_s

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """Ignore what asyncio's own clock can show."""

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return super().call_soon(self._run_timed, callback, args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return super().call_at(when, self._run_timed, callback, args, context=context)

    def _run_timed(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        owner = _owner.get()
        began = time.perf_counter()
        try:
            callback(*args)
        finally:
            self.cpu_s[owner] += time.perf_counter() - began
            self.num_events += 1


def context_of(owner: str) -> Context:
    """Return a context whose callbacks and tasks count as those of `owner`."""
    context = copy_context()
    context.run(_owner.set, owner)
    return context


@dataclass(frozen=True)
class GpuRates:
    """Rates of one accelerator.

    flops      bfloat16 operations per second
    memory     bytes per second of its memory
    link       bytes per second to accelerators of the same host, in each direction
    host_link  bytes per second to host memory
    row_s      seconds of a request in a layer, apart from its operations, where an engine computes
               the attention of one request after the other
    trains     share of `flops` that training reaches, with and without experts; None: TRAINS, less
               what experts lose
    """

    flops: float
    memory: float
    link: float
    host_link: float
    row_s: float = 0.0
    trains: float | None = None

    def count_training(self, *, has_experts: bool) -> float:
        """Return the operations per second that forward and backward passes reach."""
        if self.trains is not None:
            return self.flops * self.trains
        lost = 1 / TRAINS_EXPERTS - 1 / TRAINS if has_experts else 0.0
        return self.flops / (1 / TRAINS + lost * self.flops / H100_FLOPS)


H100_FLOPS = 989e12
TRAINS = 0.45
"""Share of the peak that training of dense models reaches (Megatron-LM's README: up to 0.47)."""
TRAINS_EXPERTS = 0.16
"""The same of mixtures of experts on an H100, as NVIDIA publishes for gpt-oss-120b in bfloat16.
What experts lose are kernels that wait for the host and exchanges of tokens, as long on another
GPU."""


GPUS = {
    "a100": GpuRates(312e12, 2.04e12, 300e9, 25e9),
    "h100": GpuRates(H100_FLOPS, 3.35e12, 450e9, 50e9),
    "h20": GpuRates(148e12, 4.0e12, 450e9, 50e9),
    "h200": GpuRates(989e12, 4.8e12, 450e9, 50e9),
    "b200": GpuRates(2250e12, 8.0e12, 900e9, 50e9),
    "mi300x": GpuRates(1307e12, 5.3e12, 448e9, 50e9),
    "cpu": GpuRates(2e11, 5e9, 2e9, 5e9, row_s=35e-6, trains=0.3),
}


@dataclass(frozen=True)
class ReachedShares:
    """ReachedShares of the peaks that are reached, and fixed times in seconds.

    prefill, decode_flops          of the operations per second, in prefill and in decode steps
    memory, link, network          of the bytes per second
    layer_s                        of a layer's kernels and collective calls in a decode step, apart
                                   from what they move
    remote_layer_s                 the same where an engine spans hosts: two all-reduces over the
                                   network
    step_s                         of a decode step in the scheduler
    microbatch_s                   of a micro-batch, apart from its operations
    call_s                         of a call to all ranks
    pause_s                        for an engine to pause, to swap its weights and to go on
    """

    prefill: float = 0.5
    decode_flops: float = 0.4
    memory: float = 0.7
    link: float = 0.6
    network: float = 0.7
    layer_s: float = 12e-6
    remote_layer_s: float = 100e-6
    step_s: float = 1e-3
    microbatch_s: float = 0.01
    call_s: float = 0.02
    pause_s: float = 0.3


class Machine:
    """Cores that processes share as an operating system divides them.

    A process that wants no more than an even share gets all it wants; the others share the rest
    evenly.
    """

    def __init__(self, num_cores: int) -> None:
        self.level = 1.0
        """Most of a core that a process gets."""
        self._num_cores = num_cores
        self._working: dict[WorkClock, Sequence[float]] = {}
        self._clocks: list[WorkClock] = []

    def add(self, clock: "WorkClock") -> None:
        """Have a clock follow the level from now on."""
        self._clocks.append(clock)

    def change(self, clock: "WorkClock", wanted: Sequence[float]) -> None:
        """Note what share of a core each process of a clock wants now, if it works."""
        self._working[clock] = wanted
        level = _level([w for shares in self._working.values() for w in shares], self._num_cores)
        if level != self.level:
            self.level = level
            for follower in self._clocks:
                follower.retime()


class Alarm:
    """A call at a time of a WorkClock."""

    def __init__(
        self, clock: "WorkClock", when_s: float, call: Callable[[], None], context: Context | None
    ) -> None:
        self.when_s = when_s
        self._clock = clock
        self._call = call
        self._context = context
        self._timer: asyncio.TimerHandle | None = None

    def set(self, loop: VirtualLoop, at_s: float) -> None:
        """Ring at a time of the loop, in place of the one that was set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._fire, context=self._context)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._clock.alarms.pop(self, None)

    def _fire(self) -> None:
        self._clock.alarms.pop(self, None)
        self._call()


class WorkClock:
    """Seconds of work that processes, which wait for one another, have had time for.

    It runs also while they have nothing to do; then they slow nobody.
    """

    def __init__(self, loop: VirtualLoop, wanted: Mapping[Machine, Sequence[float]]) -> None:
        """`wanted`: the share of a core that each process on a machine needs to keep up.

        It is empty on GPUs, where nobody waits for a core: the clock shows the time of the loop.
        """
        self.alarms: dict[Alarm, None] = {}
        self._loop = loop
        self._wanted = wanted
        self._speed = 1.0
        self._since_s = 0.0
        self._worked_s = 0.0
        self._num_jobs = 0
        for machine in wanted:
            machine.add(self)
        self.retime()

    def time(self) -> float:
        """Return the seconds of work until now."""
        return self._worked_s + (self._loop.time() - self._since_s) * self._speed

    def call_at(
        self, when_s: float, call: Callable[[], None], context: Context | None = None
    ) -> Alarm:
        """Call once the clock shows `when_s`."""
        alarm = Alarm(self, when_s, call, context)
        self.alarms[alarm] = None
        alarm.set(self._loop, self._loop_time(when_s))
        return alarm

    def begin(self) -> None:
        """Begin to work: others on the same machines may be slower from now on."""
        self._num_jobs += 1
        if self._num_jobs == 1:
            self._change(self._wanted)

    def end(self) -> None:
        self._num_jobs -= 1
        assert self._num_jobs >= 0, "work ends that did not begin"
        if not self._num_jobs:
            self._change(dict.fromkeys(self._wanted, ()))

    async def work(self, seconds: float) -> None:
        """Return after so many seconds of work."""
        self.begin()
        try:
            await self.until(self.time() + seconds)
        finally:
            self.end()

    async def until(self, when_s: float) -> None:
        """Return once the clock shows `when_s`."""
        done: asyncio.Future[None] = self._loop.create_future()
        alarm = self.call_at(when_s, partial(done.set_result, None))
        try:
            await done
        finally:
            alarm.cancel()

    def retime(self) -> None:
        """Follow a change of the machines' speed."""
        speeds = (min(1.0, m.level / max(wanted)) for m, wanted in self._wanted.items())
        speed = min(speeds, default=1.0)
        if speed == self._speed:
            return
        self._worked_s = self.time()
        self._since_s = self._loop.time()
        self._speed = speed
        for alarm in self.alarms:
            alarm.set(self._loop, self._loop_time(alarm.when_s))

    def _loop_time(self, when_s: float) -> float:
        return self._since_s + (when_s - self._worked_s) / self._speed

    def _change(self, wanted: Mapping[Machine, Sequence[float]]) -> None:
        for machine, shares in wanted.items():
            machine.change(self, shares)


def _level(wanted: Sequence[float], num_cores: float) -> float:
    """Return the most that a process gets of a core, at most 1."""
    left = num_cores
    for k, share in enumerate(sorted(wanted)):
        even = left / (len(wanted) - k)
        if share > even:
            return even
        left -= share
    return 1.0


HAND_OVER_S = 1e-4
"""Seconds that the controller's thread takes to hand work to its event loop."""
T = TypeVar("T")
S = TypeVar("S")


class VirtualTime:
    """Stands between the controller's thread and the event loop (roles.Watched)."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.in_loop_s = 0.0
        """Real seconds inside the event loop."""
        self.predicting_s = 0.0
        """Real seconds in which costs were predicted, which no controller spends."""
        self.lost: asyncio.Future[None] = loop.create_future()
        self.cut: asyncio.Future[None] | None = None
        """Raises what ends the work that is watched, but not the run; None: nothing does."""
        self._tallied: list[tuple[WorkClock, float]] | None = None
        """Seconds of one of two models that work at once."""
        self._unshared = WorkClock(loop, {})
        self.on_span: Callable[[str, float, float], None] = lambda name, begin_s, end_s: None

    def watch(self, work: Awaitable[T]) -> T:
        """Return what `work` does. Raises RunLostError as soon as the run is lost."""
        began = time.perf_counter()
        try:
            return self.loop.run_until_complete(self._first(work))
        finally:
            self.in_loop_s += time.perf_counter() - began

    def spend(self, name: str, predict: Callable[[], float], on: WorkClock | None = None) -> None:
        """Let the seconds pass that `predict` returns, while everything else goes on.

        on   counts the seconds, as those in which its processes work; None: nobody slows them
        """
        began = time.perf_counter()
        seconds = predict()
        self.predicting_s += time.perf_counter() - began
        clock = on or self._unshared
        if self._tallied is not None:
            self._tallied.append((clock, seconds))
            return
        begin_s = self.loop.time()
        self.watch(clock.work(seconds))
        self.on_span(name, begin_s, self.loop.time())

    def both(self, first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
        """Return (first(), second()) after the longer of their times (roles.BothAtOnce)."""
        results: list[Any] = []
        tallies = []
        for work in (first, second):
            self._tallied = []
            results.append(work())
            tallies.append(self._tallied)
        self._tallied = None
        begin_s = self.loop.time()
        self.watch(_all(_work(tally) for tally in tallies))
        self.on_span("trainer and critic", begin_s, self.loop.time())
        return results[0], results[1]

    async def _first(self, work: Awaitable[T]) -> T:
        await asyncio.sleep(HAND_OVER_S)
        task = asyncio.ensure_future(work)
        ends = [self.lost] if self.cut is None else [self.lost, self.cut]
        await asyncio.wait([task, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            for end in ends:
                if end.done():
                    end.result()
        return await task


async def _work(tally: Sequence[tuple[WorkClock, float]]) -> None:
    for clock, seconds in tally:
        await clock.work(seconds)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*works)
