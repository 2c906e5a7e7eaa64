"""Machines whose processes share cores, as a fluid: the more of them work, the slower each is.

    processes that work     2 on 2 cores    3 on 2 cores    2 on 2 cores
    speed of each                1               2/3             1
    seconds on a WorkClock  ------------|-- -- -- -- -- -- |-----------

A WorkClock counts the seconds of work of processes that go on together, and its alarms ring at such
times. It runs as fast as the slowest of their machines, and its speed changes when anybody begins
or ends to work there.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial

from mcore_rl.simulation.virtual_loop import VirtualLoop


class Machine:
    """Cores that processes share evenly; each takes one core at most."""

    def __init__(self, num_cores: int) -> None:
        self.speed = 1.0
        """Seconds of its work that each process gets done in a second."""
        self._num_cores = num_cores
        self._working: dict[WorkClock, float] = {}
        self._clocks: list[WorkClock] = []

    def add(self, clock: "WorkClock") -> None:
        """Have a clock follow the speed from now on."""
        self._clocks.append(clock)

    def change(self, clock: "WorkClock", num_processes: float) -> None:
        """Note how many processes of a clock work here now."""
        self._working[clock] = num_processes
        speed = min(1.0, self._num_cores / max(sum(self._working.values()), 1.0))
        if speed != self.speed:
            self.speed = speed
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
        self._timer = loop.call_at(at_s, self._ring, context=self._context)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._clock.alarms.pop(self, None)

    def _ring(self) -> None:
        self._clock.alarms.pop(self, None)
        self._call()


class WorkClock:
    """Seconds of work that processes, which wait for one another, have had time for.

    It runs also while they have nothing to do; then they slow nobody.
    """

    def __init__(self, loop: VirtualLoop, processes: Mapping[Machine, float]) -> None:
        """`processes`: how many work at once on each machine, on average; on GPUs there is none to
        wait for, and the clock shows the time of the loop.
        """
        self.alarms: dict[Alarm, None] = {}
        self._loop = loop
        self._processes = processes
        self._speed = 1.0
        self._since_s = 0.0
        self._worked_s = 0.0
        self._num_jobs = 0
        for machine in processes:
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
            self._change(self._processes)

    def end(self) -> None:
        self._num_jobs -= 1
        assert self._num_jobs >= 0, "work ends that did not begin"
        if not self._num_jobs:
            self._change(dict.fromkeys(self._processes, 0.0))

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
        speed = min((machine.speed for machine in self._processes), default=1.0)
        if speed == self._speed:
            return
        self._worked_s = self.time()
        self._since_s = self._loop.time()
        self._speed = speed
        for alarm in self.alarms:
            alarm.set(self._loop, self._loop_time(alarm.when_s))

    def _loop_time(self, when_s: float) -> float:
        return self._since_s + (when_s - self._worked_s) / self._speed

    def _change(self, processes: Mapping[Machine, float]) -> None:
        for machine, num in processes.items():
            machine.change(self, num)
