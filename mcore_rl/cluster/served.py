"""Engines of models that are served beside the policy: their options in, one ServedModel by role out."""

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.placement import Bundle, Slot, plan_engine
from mcore_rl.config import ServedModelConfig
from mcore_rl.rollout.engine import EngineSpec
from mcore_rl.rollout.served import TAKES_TEXT, ServedModel

FLAGS = {"judge": (), "reward_model": ("--is-embedding",), "teacher": ()}


class ServedModels:
    """The served models of a run. A server that dies is started again, within limits; its weights stay."""

    def __init__(
        self,
        configs: Mapping[str, ServedModelConfig],
        slots: Mapping[str, Sequence[Sequence[Slot]]],
        log_dir: Path,
        call_timeout_s: float,
        running: Mapping[str, ServedModel],
    ) -> None:
        """Begin to start the engines of `configs` by role, each in its slots. `running`: servers at a url."""
        self._configs, self._running = configs, running
        self._groups = {
            role: _start_engines(role, configs[role], of_role, log_dir, call_timeout_s)
            for role, of_role in slots.items()
        }

    def wait(self) -> dict[str, ServedModel]:
        """Every one of them, healthy. Raises RankError."""
        found = dict(self._running)
        for role, group in self._groups.items():
            config, addresses = self._configs[role], tuple(group.wait_built())
            found[role] = ServedModel(role, config, addresses, group.rotation, config.path)
        return found

    def watches(self) -> list[Awaitable[None]]:
        return [group.watch() for group in self._groups.values()]

    def server_pids(self, role: str) -> list[int]:
        return self._groups[role].server_pids()


def _start_engines(
    role: str,
    config: ServedModelConfig,
    slots: Sequence[Sequence[Slot]],
    log_dir: Path,
    call_timeout_s: float,
) -> EngineGroup:
    group = EngineGroup(slots, log_dir, call_timeout_s, role, weights_stay=True)
    specs = [_engine_spec(role, config, log_dir / f"{role}_{i}.log") for i in range(config.engines)]
    group.start_build(specs, config.startup_timeout_s, config.restarts)
    return group


def plan_served(
    configs: Mapping[str, ServedModelConfig], cpus_per_rank: float, gpus_per_node: int
) -> dict[str, list[list[Bundle]]]:
    """By role, the bundles of each engine; nothing for a server that runs already."""

    def of_role(role: str, config: ServedModelConfig) -> list[list[Bundle]]:
        return [plan_engine(config.engine_ranks, cpus_per_rank, gpus_per_node, role=role)] * config.engines

    return {role: of_role(role, config) for role, config in configs.items() if config.path}


def _engine_spec(role: str, config: ServedModelConfig, log_path: Path) -> EngineSpec:
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
        extra_args=(*FLAGS[role], *config.sglang_args),
    )
