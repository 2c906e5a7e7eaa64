"""The processes of a run: a checked Config in; training ranks and engines out, watched, gone at the end."""

import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.group import guard
from mcore_rl.cluster.placement import (
    Slot,
    gpus_per_node,
    plan_colocated,
    plan_engine,
    plan_trainer,
    reserve,
    share,
)
from mcore_rl.cluster.served import ServedModels, plan_served
from mcore_rl.cluster.session import ray_session
from mcore_rl.cluster.trainer import TrainerGroup, TrainerSpec
from mcore_rl.config import Config, OptimizerConfig, ServedModelConfig
from mcore_rl.players import EventLoop
from mcore_rl.rollout.engine import EngineSpec
from mcore_rl.rollout.served import check_served_path, find_served
from mcore_rl.slices.families import family_of
from mcore_rl.slices.fp8 import QUANTIZATION_CONFIG
from mcore_rl.slices.hf_config import read_hf_config
from mcore_rl.stream.engine_control import LOADER


class RunProcesses:
    """The ranks and engines of a run, as far as it has them."""

    def __init__(
        self,
        config: Config,
        log_dir: Path,
        event_loop: EventLoop,
        trainer: TrainerGroup | None,
        engines: EngineGroup | None,
        served: ServedModels,
    ) -> None:
        self._config, self._log_dir, self._event_loop = config, log_dir, event_loop
        self._trainer, self._engines, self.served = trainer, engines, served

    def start_trainer(self, optimizer: OptimizerConfig, num_steps: int, loss: Any) -> TrainerGroup:
        """Begin to build the model; the group's `wait_built` ends it."""
        config = self._config
        assert self._trainer is not None
        spec = TrainerSpec(
            model=config.model,
            parallel=config.parallel,
            train=config.train,
            optimizer=optimizer,
            total_steps=num_steps,
            seed=config.run.seed,
            loss=loss,
            collective_timeout_s=config.run.call_timeout_s,
        )
        self._trainer.start_build(spec, config.run.startup_timeout_s)
        return self._trainer

    def start_engines(self) -> EngineGroup:
        """Begin to start the servers; the group's `wait_built` ends it.

        They are started again if they die and there are ranks that can bring them the current weights.
        """
        config = self._config
        assert self._engines is not None
        specs = [
            _engine_spec(config, self._log_dir / f"sglang_{i}.log") for i in range(config.rollout.engines)
        ]
        max_restarts, gpu_ids = 0, []
        if self._trainer is not None:
            max_restarts = config.rollout.restarts
            if config.cluster.colocated:
                gpu_ids = [gpu for of_rank in self._trainer.gpu_ids() for gpu in of_rank]
        self._engines.start_build(specs, config.run.startup_timeout_s, max_restarts, gpu_ids)
        return self._engines

    def watched(self, work: Awaitable[Any]) -> Any:
        """The result of `work`; RankError as soon as a rank or an engine is lost meanwhile."""
        groups = [group for group in (self._trainer, self._engines) if group is not None]
        watches = [*(group.watch() for group in groups), *self.served.watches()]
        return self._event_loop.run(guard(work, *watches))

    def start_watched(self, work: Awaitable[Any]) -> "Future[Any]":
        """Begin `work`, which goes on beside all else; it ends with RankError once an engine is lost."""
        assert self._engines is not None
        return self._event_loop.start(guard(work, self._engines.watch(), *self.served.watches()))


@contextmanager
def run_processes(
    config: Config, log_dir: Path, *, with_engines: bool, with_trainer: bool, served: Sequence[str] = ()
) -> Iterator[RunProcesses]:
    """Ray, and the processes of the ranks and engines, gone at the end whatever happened.

    `served`: roles of the models that the command asks, where the recipe has them; their engines start here.
    """
    models = {role: model for role, model in config.served_models.items() if role in served}
    for role, model in models.items():
        if model.path:
            check_served_path(role, model)
    running = {role: find_served(role, model) for role, model in models.items() if model.url}
    num_ranks = config.parallel.world_size if with_trainer else 0
    num_engines = config.rollout.engines if with_engines else 0
    engine_ranks = config.rollout.engine_ranks * num_engines
    if config.cluster.colocated and engine_ranks:
        engine_ranks = max(engine_ranks, num_ranks)
    served_ranks = sum(model.engine_ranks * model.engines for model in models.values() if model.path)
    num_cpus = config.cluster.cpus_per_rank * (num_ranks + engine_ranks + served_ranks)
    timeout_s = config.run.call_timeout_s
    with ray_session(config.cluster, num_cpus):
        trainer_slots, engine_slots, served_slots = _reserve(config, num_ranks, num_engines, models)
        trainer = TrainerGroup(trainer_slots, log_dir, timeout_s) if with_trainer else None
        engines = EngineGroup(engine_slots, log_dir, timeout_s) if with_engines else None
        others = ServedModels(models, served_slots, log_dir, timeout_s, running)
        event_loop = EventLoop()
        try:
            yield RunProcesses(config, log_dir, event_loop, trainer, engines, others)
        finally:
            event_loop.close()


def _reserve(
    config: Config, num_ranks: int, num_engines: int, models: Mapping[str, ServedModelConfig]
) -> tuple[list[Slot], list[list[Slot]], dict[str, list[list[Slot]]]]:
    """Room for that many training ranks and engines, and for the engines of `models`."""
    cpus, rollout, gpus = config.cluster.cpus_per_rank, config.rollout, gpus_per_node()
    served = plan_served(models, cpus, gpus)
    colocated = config.cluster.colocated and num_ranks and num_engines
    if colocated:
        plans = [plan_colocated(num_ranks, cpus, gpus)]
    else:
        of_engine = plan_engine(rollout.engine_ranks, cpus, gpus, rollout.nodes_per_engine)
        plans = [plan_trainer(num_ranks, cpus, gpus), *[of_engine] * num_engines]
    own = len(plans)
    slots = reserve([*plans, *chain(*served.values())], config.run.startup_timeout_s)
    rest = iter(slots[own:])
    of_served = {role: list(islice(rest, len(of_role))) for role, of_role in served.items()}
    if colocated:
        return *share(slots[0], num_engines, rollout.engine_ranks, rollout.nodes_per_engine), of_served
    return slots[0], slots[1:own], of_served


def _engine_spec(config: Config, log_path: Path) -> EngineSpec:
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
        custom_weight_loaders=(LOADER,),
        gives_up_memory=config.cluster.colocated,
        seed=config.run.seed,
        extra_args=("--weight-version", "0", *dummy, *override),
    )


def experts_shape(config: Config) -> tuple[int, int] | None:
    """Layers and experts per token, if the model has experts and the recipe wants to hear of them."""
    hf_config = read_hf_config(Path(config.model.path))
    if not config.drift.routed_experts or not family_of(hf_config).sizes(hf_config).get("experts"):
        return None
    return hf_config["num_hidden_layers"], hf_config["num_experts_per_tok"]
