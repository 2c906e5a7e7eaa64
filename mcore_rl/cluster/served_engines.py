"""Engines of models that are served beside the policy: their options in, one ServedEndpoint by role out."""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path

from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.placement import Slot
from mcore_rl.config import ServedModelConfig
from mcore_rl.rollout.engine import EngineSpec
from mcore_rl.rollout.served_endpoint import TAKES_TEXT, ServedEndpoint

KEEPS_WEIGHTS = ("--enable-weights-cpu-backup",)
"""Weights whose memory is given up are kept in host memory."""
FLAGS = {"judge": (), "reward_model": ("--is-embedding",), "teacher": ()}


class ServedEngines:
    """The served models of a run. A server that dies is started again, within limits; its weights stay."""

    def __init__(
        self,
        configs: Mapping[str, ServedModelConfig],
        slots: Mapping[str, Sequence[Sequence[Slot]]],
        log_dir: Path,
        call_timeout_s: float,
        running: Mapping[str, ServedEndpoint],
        colocated: Collection[str] = (),
    ) -> None:
        """Begin to start the engines of `configs` by role, each in its slots.

        running   servers at a url
        colocated    roles whose engines share the trainer ranks' GPUs; `start_colocated` starts them
        """
        self._configs, self._running, self._log_dir = configs, running, log_dir
        self.colocated = colocated
        self._groups = {
            role: EngineGroup(of_role, log_dir, call_timeout_s, role, weights_stay=True)
            for role, of_role in slots.items()
        }
        for role in slots.keys() - set(colocated):
            self._start(role, ())

    def start_colocated(self, role: str, gpu_ids: Sequence[str]) -> list[str]:
        """Urls of the engines, once they are healthy and have their memory. `gpu_ids`: the trainer ranks'."""
        self._start(role, gpu_ids)
        return [engine.url for engine in self._groups[role].wait_built()]

    def _start(self, role: str, gpu_ids: Sequence[str]) -> None:
        is_colocated = role in self.colocated
        _start_engines(
            self._groups[role], role, self._configs[role], self._log_dir, is_colocated, gpu_ids
        )

    def wait(self) -> dict[str, ServedEndpoint]:
        """Every one of them, healthy. Raises RankError."""
        found = dict(self._running)
        for role, group in self._groups.items():
            config, addresses = self._configs[role], tuple(group.wait_built())
            found[role] = ServedEndpoint(role, config, addresses, group.health, config.path)
        return found

    def watches(self) -> list[Awaitable[None]]:
        """Of the engines that are up; `wait` tells of one that does not get so far."""
        return [group.watch() for group in self._groups.values() if group.is_built]

    def server_pids(self, role: str) -> list[int]:
        return self._groups[role].server_pids()


def _start_engines(
    group: EngineGroup,
    role: str,
    config: ServedModelConfig,
    log_dir: Path,
    is_colocated: bool,
    gpu_ids: Sequence[str],
) -> None:
    logs = [log_dir / f"{role}_{i}.log" for i in range(config.engines)]
    specs = [_engine_spec(role, config, log, gives_up_memory=is_colocated) for log in logs]
    group.start_build(specs, config.startup_timeout_s, config.restarts, gpu_ids)


def _engine_spec(
    role: str, config: ServedModelConfig, log_path: Path, *, gives_up_memory: bool
) -> EngineSpec:
    return EngineSpec(
        model_path=config.path,
        log_path=str(log_path),
        dtype=config.dtype,
        tp=config.tp,
        ep=config.ep,
        pp=config.pp,
        kv_cache_len=config.kv_cache_len,
        max_running=config.max_concurrency,
        tokenizer=role in TAKES_TEXT,
        gives_up_memory=gives_up_memory,
        extra_args=(*FLAGS[role], *(KEEPS_WEIGHTS if gives_up_memory else ()), *config.sglang_args),
    )
