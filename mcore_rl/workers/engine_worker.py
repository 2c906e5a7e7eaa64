"""Starts one SGLang server on its machine, checks it and, within limits, restarts it.

This module imports no torch: its process does nothing else, and without torch a server starts
sooner.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_rl.process.errors import ProcessLostError
from mcore_rl.process.process_state import RestartBudget, find_stopped
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineState
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.rollout.heartbeat import Heartbeat

TAIL_LINES = 5


def limit_silence(batch_timeout_s: float) -> float:
    """Return how long a scheduler may not answer: until SGLang's watchdog ended it, and 5 s more.

    The watchdog logs the stacks of a server that it ends. It sees what is stuck in a batch, but not
    in what ranks tell one another between batches.
    """
    return 1.5 * batch_timeout_s + 10.0


class RestartCounts(NamedTuple):
    """The fewest and the most restarts of any server of an engine."""

    fewest: int
    most: int


class EngineWorker:
    """Starts one server process and looks after it; the server dies with this process."""

    def __init__(
        self,
        spec: EngineSpec,
        engine: int,
        startup_timeout_s: float,
        max_restarts: int,
        stopped_s: float,
        find_address: Callable[[], str],
    ) -> None:
        """Start the server; on an engine's first machine, wait until it is healthy.

        engine         index of the engine; one that spans machines has a worker on each of them
        stopped_s      a server is lost if one of its processes is stopped for so long
        find_address   returns this machine's address for the run's other processes
        """
        self._stopped_s = stopped_s
        self._stopped_since: float | None = None
        self._index = engine
        self._startup_timeout_s = startup_timeout_s
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._budget = RestartBudget()
        self._is_stopped = False
        self._healthy_until: float | None = None
        """The deadline of a restarted server that is not healthy yet."""
        self._engine = EngineProcess(replace(spec, host=find_address()))
        self._engine.start()
        self._heartbeat = self._make_heartbeat()
        if spec.node_rank == 0:
            try:
                self._engine.wait_healthy(startup_timeout_s)
            except (RuntimeError, TimeoutError) as error:
                raise ProcessLostError(str(error)) from error

    def address(self) -> EngineAddress:
        return replace(self._engine.address, number=self._index)

    def end_requests(self, timeout_s: float) -> None:
        """End the requests of a controller that is gone, and what it paused.

        Raises ProcessLostError if the server does not answer in time.
        """
        if self._engine.spec.node_rank > 0:
            return
        try:
            self._engine.end_requests(timeout_s)
        except OSError as error:
            raise ProcessLostError(f"{self._engine.name} ended no requests: {error}") from error

    def pid(self) -> int:
        """Return the server's process id on its machine."""
        return self._engine.pid

    def _make_heartbeat(self) -> Heartbeat | None:
        """Return what listens to the engine's scheduler; only its first server tells of it."""
        spec = self._engine.spec
        if spec.node_rank > 0:
            return None
        return Heartbeat(self._engine.url, spec.keys, limit_silence(spec.batch_timeout_s))

    def check(
        self, restarts_of_engines: Sequence[RestartCounts], may_be_silent: bool = False
    ) -> EngineState:
        """Return the server's state; begin to restart a dead, stopped or stuck server at its
        address. While schedulers take weights, they `may_be_silent`.

        A live server is restarted, too, when another server of the same engine was restarted more
        often. It starts again once all servers of the engine have been stopped: it would meet a
        server that is yet to be stopped, and wait for that server forever. Raises ProcessLostError
        with the log's last lines if the server used up its restarts of an hour or does not get
        healthy in time.
        """
        counts = restarts_of_engines[self._index]
        if self._num_restarts < counts.most:
            self._stop("must restart because another server of its engine died")
        elif not self._is_stopped and not self._engine.is_alive():
            self._stop(f"died (status {self._engine.exit_status})")
        elif not self._is_stopped and (
            mute := self._find_mute() or self._find_silent(may_be_silent)
        ):
            self._stop(mute)
        if self._is_stopped:
            if self._engine.spec.num_nodes == 1 or counts.fewest >= self._num_restarts:
                self._start_again()
        elif self._healthy_until is not None:
            self._check_restarted(self._healthy_until)
        is_healthy = not self._is_stopped and self._healthy_until is None
        return EngineState(self._engine.url, self._num_restarts, is_healthy)

    def _find_mute(self) -> str:
        """Return which processes have been stopped for too long, or "".

        A stopped process answers nothing, and nothing else would end the waits for it.
        """
        pids = find_stopped(self._engine.pid)
        if not pids:
            self._stopped_since = None
            return ""
        now_s = time.monotonic()
        self._stopped_since = self._stopped_since or now_s
        if now_s - self._stopped_since < self._stopped_s:
            return ""
        self._stopped_since = None
        names = ", ".join(map(str, pids))
        return f"was stopped (state T of process {names}) for {self._stopped_s:g} s and is killed"

    def _find_silent(self, may_be_silent: bool) -> str:
        """Return for how long the scheduler of a healthy server has not answered, or ""."""
        if self._heartbeat is None or self._healthy_until is not None:
            return ""
        if may_be_silent:
            self._heartbeat.excuse()
        silent_s = self._heartbeat.find_silence_s()
        if silent_s < limit_silence(self._engine.spec.batch_timeout_s):
            return ""
        return f"has a scheduler that did not answer for {silent_s:.0f} s and is killed"

    def _stop(self, why: str) -> None:
        lost = f"{self._engine.name} {why}; its last lines:\n{self._engine.tail(TAIL_LINES)}"
        if not self._budget.take(self._max_restarts):
            raise ProcessLostError(
                f"{lost}\nit has had its {self._max_restarts} restarts of an hour"
            )
        self._num_restarts += 1
        of_hour = f"{self._budget.num_recent} of {self._max_restarts} restarts in an hour"
        print(f"{lost}\nstarting it again, {of_hour}")
        self._engine.stop()
        self._is_stopped = True

    def _start_again(self) -> None:
        self._engine = EngineProcess(self._engine.spec)
        self._engine.start()
        self._heartbeat = self._make_heartbeat()
        self._is_stopped = False
        self._healthy_until = time.monotonic() + self._startup_timeout_s

    def _check_restarted(self, deadline: float) -> None:
        if self._engine.is_healthy():
            self._healthy_until = None
        elif time.monotonic() > deadline:
            raise ProcessLostError(
                f"{self._engine.name} was started again but not healthy after"
                f" {self._startup_timeout_s:g} s; its last lines:\n{self._engine.tail(TAIL_LINES)}"
            )
