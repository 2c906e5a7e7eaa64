"""SGLang engines as Ray workers: specs in, addresses of healthy engines out.

The servers are watched and, within limits, started again.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from mcore_rl.cluster.answers import Answers
from mcore_rl.cluster.engine_worker import EngineWorker
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import Slot
from mcore_rl.device import environment_of
from mcore_rl.rollout.engine import EngineAddress, EngineSpec
from mcore_rl.rollout.engine_health import EngineHealth, EngineState

T = TypeVar("T")


class EngineGroup:
    """All engines of a run, each with one worker per machine that it spans.

    `rotation`, there once they are built, is kept up to date by `watch` and `look`. Calls raise RankError
    when a worker raises, dies, or does not answer in time, or its server died for good.
    """

    rotation: EngineHealth

    def __init__(
        self,
        slots: Sequence[Sequence[Slot]],
        log_dir: Path,
        call_timeout_s: float,
        role: str = "engine",
        weights_stay: bool = False,
    ) -> None:
        """Start the workers' processes, without waiting for them. `slots`: per engine, one per machine.

        `role` names them and their logs. `weights_stay`: an engine started again serves as soon as it is up.
        """
        self._weights_stay = weights_stay
        self._num_nodes = [len(of_engine) for of_engine in slots]
        self._restarts = [0] * len(slots)
        self._group = RankGroup(role, [slot for of_engine in slots for slot in of_engine], log_dir)
        self._call_timeout_s = call_timeout_s
        self._building: Answers | None = None
        self._addresses: list[EngineAddress] | None = None

    def start_build(
        self,
        specs: Sequence[EngineSpec],
        timeout_s: float,
        max_restarts: int = 0,
        gpu_ids: Sequence[str] = (),
    ) -> None:
        """Begin to start the servers, one spec per engine; `wait_built` ends it.

        `gpu_ids`: on which GPUs, one for each rank of each engine; none given: those that Ray assigned.
        An engine of which a server dies later is started again, `max_restarts` times each.
        """
        spread = self._num_nodes
        points = self._group.meeting_points(timeout_s) if max(spread) > 1 else []
        args, gpus = [], iter(gpu_ids)
        for engine, (spec, num_nodes) in enumerate(zip(specs, spread, strict=True)):
            first = len(args)
            meet = "{}:{}".format(*points[first]) if num_nodes > 1 else None
            on_each = spec.tp * spec.pp // num_nodes
            for node_rank in range(num_nodes):
                of_node = replace(
                    spec,
                    num_nodes=num_nodes,
                    node_rank=node_rank,
                    dist_init_addr=meet,
                    environment=environment_of(tuple(islice(gpus, on_each))),
                )
                args.append((_own_log(of_node), engine, timeout_s, max_restarts))
        self._building = self._group.start_build(EngineWorker, args, timeout_s)

    def wait_built(self) -> list[EngineAddress]:
        """Where the healthy engines answer, in the order of the specs."""
        assert self._building is not None, "start_build comes first"
        if self._addresses is not None:
            return self._addresses
        self._group.finish(self._building)
        self._addresses = addresses = self._firsts(
            self._group.call_all("address", deadline_s=self._call_timeout_s)
        )
        self.rotation = EngineHealth([address.url for address in addresses], self._weights_stay)
        return addresses

    @property
    def is_built(self) -> bool:
        return self._addresses is not None

    def server_pids(self) -> list[int]:
        return self._group.call_all("pid", deadline_s=self._call_timeout_s)

    async def look(self) -> None:
        """Bring `rotation` up to date now; raise RankError if a server died for good, or its worker."""
        self._note(
            await self._group.call_all_async(
                "check", self._restarts, deadline_s=self._call_timeout_s
            )
        )

    async def watch(self) -> None:
        """Return never; raise RankError once a server died for good, or its worker."""
        await self._group.watch("check", self._restarts, note=self._note)

    def _note(self, lives: Sequence[EngineState]) -> None:
        """An engine is as healthy as the server on its first machine, which waits for the others."""
        per_server = iter(lives)
        whole = []
        for engine, num_nodes in enumerate(self._num_nodes):
            first, *others = islice(per_server, num_nodes)
            restarts = max(life.restarts for life in (first, *others))
            self._restarts[engine] = restarts
            healthy = first.healthy and first.restarts == restarts
            whole.append(replace(first, restarts=restarts, healthy=healthy))
        self.rotation.note(whole)

    def _firsts(self, answers: Sequence[T]) -> list[T]:
        """Per engine, the answer of the worker on its first machine."""
        return [answers[sum(self._num_nodes[:i])] for i in range(len(self._num_nodes))]


def _own_log(spec: EngineSpec) -> EngineSpec:
    """With a log of its own for each machine but the first."""
    log = Path(spec.log_path)
    name = log.name if spec.node_rank == 0 else f"{log.stem}_node{spec.node_rank}{log.suffix}"
    return replace(spec, log_path=str(log.with_name(name)))
