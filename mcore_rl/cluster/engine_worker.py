"""One SGLang server on its machine, started, looked after and, within limits, started again.

Its process does nothing else, so this module does without torch: a server starts sooner for it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.cluster.host import ProcessLost, node_address
from mcore_rl.rollout.engine import EngineAddress, EngineProcess, EngineSpec
from mcore_rl.rollout.engine_health import EngineState

TAIL_LINES = 5


class EngineWorker:
    """Starts one server process and keeps it; the server dies with this process."""

    def __init__(
        self, spec: EngineSpec, engine: int, startup_timeout_s: float, max_restarts: int
    ) -> None:
        """`engine`: the index of the engine that this server is all or, on one of its machines, a part of."""
        self._index, self._startup_timeout_s, self._max_restarts = (
            engine,
            startup_timeout_s,
            max_restarts,
        )
        self._num_restarts = 0
        self._healthy_until: float | None = None
        """While a server that was started again is not up: when it has to be."""
        self._engine = EngineProcess(replace(spec, host=node_address()))
        self._engine.start()
        if spec.node_rank == 0:
            try:
                self._engine.wait_healthy(startup_timeout_s)
            except (RuntimeError, TimeoutError) as error:
                raise ProcessLost(str(error)) from error

    def address(self) -> EngineAddress:
        return EngineAddress(self._engine.url, self._engine.spec.log_path)

    def pid(self) -> int:
        """Of the server, on its machine."""
        return self._engine.pid

    def check(self, restarts_of_engines: Sequence[int]) -> EngineState:
        """How the server fares. A dead one is started again at the same address, without waiting for it.

        So is one that lives, but belongs to an engine whose other servers were started again more often.
        Raises ProcessLost, with the log's last lines, if it was started again often enough already or does
        not get healthy.
        """
        if not self._engine.is_alive():
            self._restart(f"died (status {self._engine.exit_status})")
        elif self._num_restarts < restarts_of_engines[self._index]:
            self._restart("is of no use without the engine's other server, which died")
        elif self._healthy_until is not None:
            self._see_whether_it_is_up(self._healthy_until)
        return EngineState(self._engine.url, self._num_restarts, self._healthy_until is None)

    def _restart(self, why: str) -> None:
        lost = f"{self._engine.name} {why}; its last lines:\n{self._engine.tail(TAIL_LINES)}"
        if self._num_restarts >= self._max_restarts:
            raise ProcessLost(lost)
        self._num_restarts += 1
        print(f"{lost}\nstarting it again, {self._num_restarts} of {self._max_restarts}")
        self._engine.stop()
        self._engine = EngineProcess(self._engine.spec)
        self._engine.start()
        self._healthy_until = time.monotonic() + self._startup_timeout_s

    def _see_whether_it_is_up(self, deadline: float) -> None:
        if self._engine.is_healthy():
            self._healthy_until = None
        elif time.monotonic() > deadline:
            tail = self._engine.tail(TAIL_LINES)
            raise ProcessLost(
                f"{self._engine.name} was started again but not healthy after {self._startup_timeout_s:g} s;"
                f" its last lines:\n{tail}"
            )
