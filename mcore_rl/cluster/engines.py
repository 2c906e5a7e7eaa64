"""SGLang engines as Ray workers: specs in, addresses of healthy engines out.

The servers are watched and, within limits, started again.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mcore_rl.cluster.answers import Answers
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.host import ProcessLost, node_address
from mcore_rl.cluster.placement import Slot
from mcore_rl.rollout.client import EngineAddress
from mcore_rl.rollout.engine import EngineProcess, EngineSpec
from mcore_rl.rollout.rotation import EngineLife, Rotation

T = TypeVar("T")
TAIL_LINES = 5


class EngineWorker:
    """Starts one server process and keeps it; the server dies with this process."""

    def __init__(self, spec: EngineSpec, startup_timeout_s: float, max_restarts: int) -> None:
        self._startup_timeout_s, self._max_restarts = startup_timeout_s, max_restarts
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

    def check(self) -> EngineLife:
        """How the server fares. A dead one is started again at the same address, without waiting for it.

        Raises ProcessLost, with the log's last lines, if it was started again often enough already or does
        not get healthy.
        """
        if not self._engine.is_alive():
            self._restart()
        elif self._healthy_until is not None:
            self._see_whether_it_is_up(self._healthy_until)
        return EngineLife(self._engine.url, self._num_restarts, self._healthy_until is None)

    def _restart(self) -> None:
        status, tail = self._engine.exit_status, self._engine.tail(TAIL_LINES)
        died = f"{self._engine.name} died (status {status}); its last lines:\n{tail}"
        if self._num_restarts >= self._max_restarts:
            raise ProcessLost(died)
        self._num_restarts += 1
        print(f"{died}\nstarting it again, {self._num_restarts} of {self._max_restarts}")
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


class EngineGroup:
    """All engines of a run, each with one worker per machine that it spans.

    `rotation`, there once they are built, is kept up to date by `watch` and `look`. Calls raise RankError
    when a worker raises, dies, or does not answer in time, or its server died for good.
    """

    rotation: Rotation

    def __init__(self, slots: Sequence[Sequence[Slot]], log_dir: Path, call_timeout_s: float) -> None:
        """Start the workers' processes, without waiting for them. `slots`: per engine, one per machine."""
        self._num_nodes = [len(of_engine) for of_engine in slots]
        self._group = RankGroup("engine", [slot for of_engine in slots for slot in of_engine], log_dir)
        self._call_timeout_s = call_timeout_s
        self._building: Answers | None = None

    def start_build(self, specs: Sequence[EngineSpec], timeout_s: float, max_restarts: int = 0) -> None:
        """Begin to start the servers, one spec per engine; `wait_built` ends it.

        A server that dies later is started again, `max_restarts` times each; none that spans machines is.
        """
        spread = self._num_nodes
        points = self._group.meeting_points(timeout_s) if max(spread) > 1 else []
        args = []
        for spec, num_nodes in zip(specs, spread, strict=True):
            first = len(args)
            meet = "{}:{}".format(*points[first]) if num_nodes > 1 else None
            for node_rank in range(num_nodes):
                of_node = replace(spec, num_nodes=num_nodes, node_rank=node_rank, dist_init_addr=meet)
                args.append((of_node, timeout_s, max_restarts if num_nodes == 1 else 0))
        self._building = self._group.start_build(EngineWorker, args, timeout_s)

    def wait_built(self) -> list[EngineAddress]:
        """Where the healthy engines answer, in the order of the specs."""
        assert self._building is not None, "start_build comes first"
        self._group.finish(self._building)
        addresses = self._firsts(self._group.call_all("address", deadline_s=self._call_timeout_s))
        self.rotation = Rotation([address.url for address in addresses])
        return addresses

    def server_pids(self) -> list[int]:
        return self._group.call_all("pid", deadline_s=self._call_timeout_s)

    async def look(self) -> None:
        """Bring `rotation` up to date now; raise RankError if a server died for good, or its worker."""
        self._note(await self._group.call_all_async("check", deadline_s=self._call_timeout_s))

    async def watch(self) -> None:
        """Return never; raise RankError once a server died for good, or its worker."""
        await self._group.watch("check", self._note)

    def _note(self, lives: Sequence[EngineLife]) -> None:
        self.rotation.note(self._firsts(lives))

    def _firsts(self, answers: Sequence[T]) -> list[T]:
        """Per engine, the answer of the worker on its first machine."""
        return [answers[sum(self._num_nodes[:i])] for i in range(len(self._num_nodes))]
