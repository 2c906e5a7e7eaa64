"""Runs the engines of judge, reward model and teacher, by role."""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path

from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.config import ServedModelConfig
from mcore_rl.config.deadlines import limit_batch
from mcore_rl.config.upstream.values import server_arguments
from mcore_rl.planning.slots import Slot
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.served_models import TEXT_ROLES, ServedEndpoint, find_dtype

KEEP_WEIGHTS = ("--enable-weights-cpu-backup",)
"""SGLang keeps a copy of the weights on the host while GPU memory is released."""
ROLE_ARGUMENTS = {"judge": (), "reward_model": ("--is-embedding",), "teacher": ()}


class ServedEngines:
    """The engines of a run's served models.

    A server that dies is restarted, within limits; it loads its own weights and needs no sync.
    """

    def __init__(
        self,
        configs: Mapping[str, ServedModelConfig],
        slots: Mapping[str, Sequence[Sequence[Slot]]],
        log_dir: Path,
        call_timeout_s: float,
        remote: Mapping[str, ServedEndpoint],
        keys: ServerKeys,
        colocated: Collection[str] = (),
    ) -> None:
        """Begin to start the engines of `configs` by role, each in its slots.

        remote      endpoints of servers that run elsewhere, by role
        keys        keys that requests to the engines must have
        colocated   roles whose engines share the trainer ranks' GPUs; `start_colocated` starts them
        """
        self._configs = configs
        self._remote = remote
        self._keys = keys
        self._log_dir = log_dir
        self.colocated = colocated
        self._groups = {
            role: EngineGroup(role_slots, log_dir, call_timeout_s, role, weights_stay=True)
            for role, role_slots in slots.items()
        }
        for role in slots.keys() - set(colocated):
            self._start(role, ())

    def start_colocated(self, role: str, gpu_ids: Sequence[str]) -> list[str]:
        """Start engines on the trainer ranks' GPUs; return their urls once they are healthy."""
        self._start(role, gpu_ids)
        return [engine.url for engine in self._groups[role].wait_built()]

    def wait_built(self) -> dict[str, ServedEndpoint]:
        """Wait until all engines are healthy; return the endpoints by role. Raises RankError."""
        endpoints = dict(self._remote)
        for role, group in self._groups.items():
            config = self._configs[role]
            addresses = tuple(group.wait_built())
            endpoints[role] = ServedEndpoint(
                role, config, addresses, group.health, config.path, self._keys.user
            )
        return endpoints

    def watches(self) -> list[Awaitable[None]]:
        """Return a watch for each role with built engines; `wait_built` reports failed starts."""
        return [group.watch() for group in self._groups.values() if group.is_built]

    def server_pids(self, role: str) -> list[int]:
        return self._groups[role].server_pids()

    def _start(self, role: str, gpu_ids: Sequence[str]) -> None:
        self._start_engines(role, self._configs[role], gpu_ids)

    def _start_engines(self, role: str, config: ServedModelConfig, gpu_ids: Sequence[str]) -> None:
        is_colocated = role in self.colocated
        specs = [
            make_served_spec(
                role,
                config,
                self._log_dir / f"{role}_{i}.log",
                self._keys,
                can_release_memory=is_colocated,
            )
            for i in range(config.engines)
        ]
        self._groups[role].start_build(specs, config.startup_timeout_s, config.restarts, gpu_ids)


def make_served_spec(
    role: str,
    config: ServedModelConfig,
    log_path: Path,
    keys: ServerKeys,
    *,
    can_release_memory: bool,
) -> EngineSpec:
    """Return the spec of a served model's engine; `can_release_memory` if it shares GPUs."""
    keep_weights = KEEP_WEIGHTS if can_release_memory else ()
    return EngineSpec(
        model_path=config.path,
        log_path=str(log_path),
        dtype=find_dtype(config.dtype, Path(config.path), f"{role}.dtype"),
        tp=config.tp,
        ep=config.ep,
        pp=config.pp,
        kv_cache_len=config.kv_cache_len,
        max_running=config.max_concurrency,
        tokenizer=role in TEXT_ROLES,
        keys=keys,
        can_release_memory=can_release_memory,
        batch_timeout_s=limit_batch(config.request_timeout_s),
        extra_args=(*ROLE_ARGUMENTS[role], *keep_weights, *server_arguments(config.sglang)),
    )
