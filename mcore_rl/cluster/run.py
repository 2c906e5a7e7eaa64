"""The processes of a run: a checked Config in; training ranks and engines out, watched, gone at the end."""

import json
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.cluster.critic import CriticGroup
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.group import guard
from mcore_rl.cluster.model_group import ModelSpec
from mcore_rl.cluster.served_engines import ServedEngines
from mcore_rl.cluster.session import ray_session
from mcore_rl.cluster.slots import reserve_slots
from mcore_rl.cluster.trainer import TrainerGroup
from mcore_rl.config import Config, ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.planning.run_size import RunSize
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.engine import EngineSpec
from mcore_rl.rollout.routed_experts import RoutedExpertsShape
from mcore_rl.rollout.served_endpoint import check_served_path, find_served
from mcore_rl.slices.families import family_of
from mcore_rl.slices.hf.config import moe_layers, read_hf_config
from mcore_rl.slices.hf.fp8 import QUANTIZATION_CONFIG
from mcore_rl.stream.controller.engine_control import LOADER


class RunProcesses:
    """The ranks and engines of a run, as far as it has them."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        event_loop: EventLoop,
        trainer: TrainerGroup | None,
        critic: CriticGroup | None,
        engines: EngineGroup | None,
        served: ServedEngines,
    ) -> None:
        self._config, self._log_dir, self._event_loop = config, log_dir, event_loop
        self._trainer, self._critic, self._engines, self.served = trainer, critic, engines, served

    def start_trainer(self, optimizer: OptimizerConfig, num_steps: int, loss: Any) -> TrainerGroup:
        """Begin to build the model; the group's `wait_built` ends it."""
        assert self._trainer is not None
        config = self._config
        spec = self._spec(config.model, config.parallel, optimizer, num_steps, loss)
        self._trainer.start_build(spec, config.run.startup_timeout_s)
        return self._trainer

    def start_critic(self, num_steps: int, loss: Any) -> CriticGroup | None:
        """Likewise of the critic, if the recipe has one."""
        if self._critic is None:
            return None
        config, critic = self._config, self._config.critic
        model = replace(config.model, path=critic.path or config.model.path)
        spec = self._spec(model, critic.parallel, critic.optimizer, num_steps, loss)
        assert self._trainer is not None
        gpu_ids = self._trainer.gpu_ids() if critic.colocated else []
        self._critic.start_build(spec, config.run.startup_timeout_s, gpu_ids)
        return self._critic

    def _spec(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        num_steps: int,
        loss: Any,
    ) -> ModelSpec:
        return ModelSpec(
            model=model,
            parallel=parallel,
            train=self._config.train,
            optimizer=optimizer,
            total_steps=num_steps,
            seed=self._config.run.seed,
            loss=loss,
            collective_timeout_s=self._config.run.call_timeout_s,
        )

    def start_engines(self) -> EngineGroup:
        """Begin to start the servers; the group's `wait_built` ends it.

        They are started again if they die and there are ranks that can bring them the current weights.
        """
        config = self._config
        assert self._engines is not None
        specs = [
            engine_spec(config, self._log_dir / f"sglang_{i}.log")
            for i in range(config.rollout.engines)
        ]
        max_restarts, gpu_ids = 0, []
        if self._trainer is not None:
            max_restarts = config.rollout.restarts
            if config.cluster.colocated:
                gpu_ids = [gpu for of_rank in self._trainer.gpu_ids() for gpu in of_rank]
        self._engines.start_build(specs, config.run.startup_timeout_s, max_restarts, gpu_ids)
        return self._engines

    def start_colocated_served(self, role: str) -> list[str]:
        """Urls of the engines of a served model on the trainer ranks' GPUs, once they are healthy."""
        assert self._trainer is not None
        return self.served.start_colocated(
            role, [gpu for of_rank in self._trainer.gpu_ids() for gpu in of_rank]
        )

    def watched(self, work: Awaitable[Any]) -> Any:
        """The result of `work`; RankError as soon as a rank or an engine is lost meanwhile."""
        groups = [
            group for group in (self._trainer, self._critic, self._engines) if group is not None
        ]
        watches = [*(group.watch() for group in groups), *self.served.watches()]
        return self._event_loop.run(guard(work, *watches))

    def start_watched(self, work: Awaitable[Any]) -> "Future[Any]":
        """Begin `work`, which goes on beside all else; it ends with RankError once an engine is lost."""
        assert self._engines is not None
        return self._event_loop.start(guard(work, self._engines.watch(), *self.served.watches()))


@contextmanager
def run_processes(
    config: Config,
    log_dir: Path,
    *,
    with_engines: bool,
    with_trainer: bool,
    with_critic: bool = False,
    served: Sequence[str] = (),
) -> Iterator[RunProcesses]:
    """Ray, and the processes of the ranks and engines, gone at the end whatever happened.

    `served`: roles of the models that the command asks, where the recipe has them; their engines start here.
    """
    models = {role: model for role, model in config.served_models.items() if role in served}
    for role, model in models.items():
        if model.path:
            check_served_path(role, model)
    running = {role: find_served(role, model) for role, model in models.items() if model.url}
    size = RunSize.of(
        config,
        models,
        with_engines=with_engines,
        with_trainer=with_trainer,
        with_critic=with_critic,
    )
    timeout_s = config.run.call_timeout_s
    with ray_session(config.cluster, size.num_cpus(config)):
        slots = reserve_slots(config, size)
        trainer = TrainerGroup(slots.trainer, log_dir, timeout_s) if with_trainer else None
        critic = CriticGroup(slots.critic, log_dir, timeout_s) if with_critic else None
        engines = EngineGroup(slots.engines, log_dir, timeout_s) if with_engines else None
        others = ServedEngines(
            models, slots.served, log_dir, timeout_s, running, size.colocated_served
        )
        event_loop = EventLoop()
        try:
            yield RunProcesses(config, log_dir, event_loop, trainer, critic, engines, others)
        finally:
            event_loop.close()


def engine_spec(config: Config, log_path: Path) -> EngineSpec:
    """Of each of the recipe's engines, all of it in one process; they hold the weights of version 0."""
    rollout = config.rollout
    fp8 = rollout.quantization == "fp8"
    dummy = ("--load-format", "dummy") if fp8 or config.model.init == "random" else ()
    quantised = json.dumps({"quantization_config": QUANTIZATION_CONFIG})
    override = ("--json-model-override-args", quantised) if fp8 else ()
    return EngineSpec(
        model_path=config.model.path,
        log_path=str(log_path),
        dtype=config.model.dtype,
        tp=rollout.tp,
        ep=rollout.ep,
        pp=rollout.pp,
        attention_dp=rollout.attention_dp,
        kv_cache_len=rollout.kv_cache_len,
        max_running=rollout.max_concurrency,
        deterministic=rollout.deterministic,
        routed_experts=experts_shape(config) is not None,
        trust_remote_code=config.model.trust_remote_code,
        custom_weight_loaders=(LOADER,),
        gives_up_memory=config.cluster.colocated,
        seed=config.run.seed,
        extra_args=("--weight-version", "0", *dummy, *override),
    )


def experts_shape(config: Config) -> RoutedExpertsShape | None:
    """What engines tell of experts, if the model has any and the recipe wants to hear of them."""
    hf_config = read_hf_config(Path(config.model.path))
    moe = tuple(map(bool, moe_layers(hf_config)))
    if not config.drift.routed_experts or not any(moe):
        return None
    num_experts = family_of(hf_config).sizes(hf_config)["experts"]
    return RoutedExpertsShape(moe, hf_config["num_experts_per_tok"], num_experts)
