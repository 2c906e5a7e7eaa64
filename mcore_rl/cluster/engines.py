"""SGLang engines as Ray workers, each watching the server process it started."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import Slot
from mcore_rl.rollout.client import EngineAddress
from mcore_rl.rollout.engine import EngineProcess, EngineSpec

WATCH_POLL_S = 0.5


class EngineWorker:
    """Starts one server and keeps it; the server dies with this process."""

    def __init__(self, spec: EngineSpec, startup_timeout_s: float) -> None:
        import ray

        address = ray.util.get_node_ip_address() if spec.host == "" else spec.host
        self._engine = EngineProcess(replace(spec, host=address))
        self._engine.start()
        self._engine.wait_healthy(startup_timeout_s)

    def address(self) -> EngineAddress:
        return EngineAddress(self._engine.url, self._engine.spec.log_path)

    def check(self) -> None:
        """RuntimeError with the log's last lines if the server is gone."""
        if not self._engine.is_alive():
            raise RuntimeError(f"{self._engine.name} died; its last lines:\n{self._engine.tail()}")


class EngineGroup:
    """All engines of a run."""

    def __init__(self, slots: Sequence[Slot], log_dir: Path, call_timeout_s: float) -> None:
        """Start the workers' processes, without waiting for them."""
        self._group = RankGroup("engine", slots, log_dir)
        self._call_timeout_s = call_timeout_s
        self._building: Any = None

    def start_build(self, specs: Sequence[EngineSpec], timeout_s: float) -> None:
        """Begin to start the servers; `wait_built` ends it."""
        args = [(spec, timeout_s) for spec in specs]
        self._building = self._group.start_build(EngineWorker, args, timeout_s)

    def wait_built(self) -> list[EngineAddress]:
        """Where the healthy engines answer."""
        self._group.finish(self._building)
        return self._group.call_all("address", deadline_s=self._call_timeout_s)

    async def watch(self) -> None:
        """Return never; raise RankError once a server or its worker is gone."""
        await self._group.watch("check")
