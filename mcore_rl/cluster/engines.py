"""SGLang engines as Ray workers: specs in, addresses of healthy engines out; the servers are watched."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.cluster.answers import Answers
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.host import ProcessLost, node_address
from mcore_rl.cluster.placement import Slot
from mcore_rl.rollout.client import EngineAddress
from mcore_rl.rollout.engine import EngineProcess, EngineSpec

TAIL_LINES = 5


class EngineWorker:
    """Starts one server process and keeps it; the server dies with this process."""

    def __init__(self, spec: EngineSpec, startup_timeout_s: float) -> None:
        self._engine = EngineProcess(replace(spec, host=node_address()))
        self._engine.start()
        if spec.node_rank == 0:
            self._engine.wait_healthy(startup_timeout_s)

    def address(self) -> EngineAddress:
        return EngineAddress(self._engine.url, self._engine.spec.log_path)

    def pid(self) -> int:
        """Of the server, on its machine."""
        return self._engine.pid

    def check(self) -> None:
        """ProcessLost, with the log's last lines, if the server is gone."""
        if not self._engine.is_alive():
            status, tail = self._engine.exit_status, self._engine.tail(TAIL_LINES)
            raise ProcessLost(f"{self._engine.name} died (status {status}); its last lines:\n{tail}")


class EngineGroup:
    """All engines of a run, each with one worker per machine that it spans.

    Calls raise RankError when a worker raises, dies, or does not answer in time.
    """

    def __init__(self, slots: Sequence[Sequence[Slot]], log_dir: Path, call_timeout_s: float) -> None:
        """Start the workers' processes, without waiting for them. `slots`: per engine, one per machine."""
        self._num_nodes = [len(of_engine) for of_engine in slots]
        self._group = RankGroup("engine", [slot for of_engine in slots for slot in of_engine], log_dir)
        self._call_timeout_s = call_timeout_s
        self._building: Answers | None = None

    def start_build(self, specs: Sequence[EngineSpec], timeout_s: float) -> None:
        """Begin to start the servers, one spec per engine; `wait_built` ends it."""
        spread = self._num_nodes
        points = self._group.meeting_points(timeout_s) if max(spread) > 1 else []
        args = []
        for spec, num_nodes in zip(specs, spread, strict=True):
            first = len(args)
            meet = "{}:{}".format(*points[first]) if num_nodes > 1 else None
            for node_rank in range(num_nodes):
                of_node = replace(spec, num_nodes=num_nodes, node_rank=node_rank, dist_init_addr=meet)
                args.append((of_node, timeout_s))
        self._building = self._group.start_build(EngineWorker, args, timeout_s)

    def wait_built(self) -> list[EngineAddress]:
        """Where the healthy engines answer, in the order of the specs."""
        assert self._building is not None, "start_build comes first"
        self._group.finish(self._building)
        addresses = self._group.call_all("address", deadline_s=self._call_timeout_s)
        firsts = [sum(self._num_nodes[:i]) for i in range(len(self._num_nodes))]
        return [addresses[i] for i in firsts]

    def check_alive(self) -> None:
        """Raise RankError if a server or its worker is gone."""
        self._group.call_all("check", deadline_s=self._call_timeout_s)

    def server_pids(self) -> list[int]:
        return self._group.call_all("pid", deadline_s=self._call_timeout_s)

    async def watch(self) -> None:
        """Return never; raise RankError once a server or its worker is gone."""
        await self._group.watch("check")
