"""Starts the training ranks and engines of a run from a checked Config, and watches them.

All processes are gone when the block of `run_processes` ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from mcore_rl.cluster.adapter_slots import make_adapter_slots
from mcore_rl.cluster.breakpoints import answer_in_controller, name_breakpoints
from mcore_rl.cluster.collectors import CollectorGroup, CollectorLimits
from mcore_rl.cluster.colocated_engines import ColocatedEngines, Returns
from mcore_rl.cluster.engine_specs import make_engine_spec
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.environment import make_nsys_environments
from mcore_rl.cluster.group import guard
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.cluster.outliving import Outliving, open_outliving
from mcore_rl.cluster.placement import (
    find_gpus_per_node,
    report_placement,
    reserve,
    reserve_in_ray,
)
from mcore_rl.cluster.served_engines import ServedEngines
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.shared_folder import bring_run_files
from mcore_rl.cluster.state_keepers import StateKeepers
from mcore_rl.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.config.deadlines import Deadlines, limit_stopped
from mcore_rl.planning.bundles import RunSize, plan_run
from mcore_rl.planning.recipe_models import make_critic_training, shares_frozen
from mcore_rl.planning.slots import RunSlots, Slot
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.served_models import ServedEndpoint, check_served_path, find_endpoint
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.collector_worker import CollectorSpec
from mcore_rl.workers.model_worker import ModelSpec

_log = logging.getLogger(__name__)
MORE_ROOM_S = 10.0
"""How long Ray may take to find room for an engine that is added."""


Groups = tuple[TrainerGroup | None, CriticGroup | None, EngineGroup | None, CollectorGroup | None]


class RunProcesses:
    """The ranks and engines of a run; a group that the command does not need is None."""

    def __init__(
        self,
        config: Config,
        policy: ModelFacts,
        log_dir: Path,
        event_loop: EventLoop,
        groups: Groups,
        served_engines: ServedEngines,
        keys: ServerKeys,
        outliving: Outliving,
    ) -> None:
        """`keys`: those of the run's servers, which are new unless engines go on.

        outliving   what of these processes outlives this one
        """
        self._config = config
        self._policy = policy
        self._log_dir = log_dir
        self.event_loop = event_loop
        self._trainer, self._critic, self._engines, self.collectors = groups
        self.served_engines = served_engines
        self.keys = keys
        self.outliving = outliving
        self.recovers = False
        """Whether lost ranks of trainer and critic are recovered."""
        self.recover_beside_sampling: Callable[[Exception], None] | None = None
        """Recovers lost ranks while engines sample; None if they cannot be recovered then."""

    def start_trainer(self, optimizer: OptimizerConfig, num_steps: int, loss: Any) -> TrainerGroup:
        """Start building the policy on its ranks; the group's `wait_built` waits for it."""
        assert self._trainer is not None
        config = self._config
        spec = self._make_spec(
            config.model, config.parallel, config.train, optimizer, num_steps, loss
        )
        spec = replace(spec, lends_frozen=self._shares_frozen)
        self._trainer.start_build(spec, config.run.startup_timeout_s)
        return self._trainer

    def start_critic(self, num_steps: int, loss: Any) -> CriticGroup | None:
        """Start building the critic on its ranks; return None if the recipe has no critic."""
        if self._critic is None:
            return None
        config = self._config
        critic = config.critic
        model = replace(config.model, path=critic.path or config.model.path)
        train = make_critic_training(config.train, critic)
        spec = self._make_spec(model, critic.parallel, train, critic.optimizer, num_steps, loss)
        assert self._trainer is not None
        if self._shares_frozen:
            spec = replace(spec, frozen_paths=self._trainer.find_frozen_paths())
        find_shared = self._trainer.list_gpus if critic.colocated else None
        self._critic.start_build(spec, config.run.startup_timeout_s, find_shared)
        return self._critic

    @property
    def _shares_frozen(self) -> bool:
        """Return whether the critic's ranks map the weights below factors of the trainer's."""
        config = self._config
        has_critic = self._critic is not None
        return has_critic and shares_frozen(config.train.lora, config.parallel, config.critic)

    def _make_spec(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        num_steps: int,
        loss: Any,
    ) -> ModelSpec:
        return ModelSpec(
            model=model,
            parallel=parallel,
            train=train,
            optimizer=optimizer,
            total_steps=num_steps,
            seed=self._config.run.seed,
            loss=loss,
            collective_timeout_s=self._config.run.call_timeout_s,
            profile=self._config.profile,
            profile_dir=str(self._log_dir.parent / "profile"),
            outlives_failed_saves=self._config.checkpoint.on_error == "continue",
            quantization=self._config.rollout.quantization,
            serves_drafts=self._config.rollout.speculate == "mtp",
        )

    def start_engines(self) -> EngineGroup:
        """Start the policy's engines; the group's `wait_built` waits for them.

        A server that dies is restarted only if trainer ranks can bring it the current weights.
        """
        config = self._config
        assert self._engines is not None
        has_trainer = self._trainer is not None
        adapters = make_adapter_slots(config.train.lora, self._policy, has_trainer=has_trainer)
        specs = [
            make_engine_spec(
                config.model,
                config.rollout,
                config.drift,
                self._policy,
                self._log_dir / f"sglang_{i}.log",
                self.keys,
                seed=config.run.seed,
                can_release_memory=config.cluster.colocated,
                adapters=adapters,
            )
            for i in range(config.rollout.engines)
        ]
        max_restarts = 0
        gpu_ids: list[str] = []
        if self._trainer is not None:
            max_restarts = config.rollout.restarts
            if isinstance(self._engines, ColocatedEngines):
                self._engines.return_with(self._return_with_ranks(self._trainer))
            if config.cluster.colocated:
                gpu_ids = self._list_trainer_gpus()
        stopped_s = Deadlines.from_options(
            config.run, config.rollout, config.reward, config.served_groups.values()
        ).stopped
        startup_s = config.run.startup_timeout_s
        self._engines.start_build(specs, startup_s, max_restarts, gpu_ids, stopped_s)
        return self._engines

    def _return_with_ranks(self, trainer: TrainerGroup) -> Returns:
        """Return how engines on the GPUs of `trainer` are started again: as ranks are recovered."""
        num_ranks = sum(group.world_size for group in (trainer, self._critic) if group is not None)
        most = self._config.run.recovery.limit_restarts(num_ranks)
        return Returns(trainer.find_seats, lambda: self.recovers, most)

    def note_done(self, positions: bytes, keepers: StateKeepers) -> None:
        """Have another controller go on with these processes, from the loop's positions.

        Does nothing where they end with this one. Ranks of another layout than the recipe's do not
        go on.
        """
        models = {group.role: group for group in (self._trainer, self._critic) if group is not None}
        if any(group.was_resized for group in models.values()):
            self.outliving.forget()
            return
        actors = {role: group.actors for role, group in models.items()}
        if self._engines is not None:
            actors["engines"] = self._engines.list_actors()
        self.outliving.note(actors, keepers.describe(), positions)

    @property
    def are_engines_colocated(self) -> bool:
        """Whether engines share the GPUs of the trainer's ranks."""
        return self._config.cluster.colocated

    def reserve_engine(self) -> list[Slot]:
        """Reserve room for one more engine. Raises ValueError if the cluster has too little."""
        config = self._config
        if self.are_engines_colocated:
            raise ValueError(
                "cluster.colocated=true: engines share the GPUs of the trainer's ranks; none can be"
                " added"
            )
        size = RunSize.make(config, "train")
        plan = plan_run(size, config.rollout, config.cluster, find_gpus_per_node()).engines[0]
        try:
            [slots] = reserve([plan], MORE_ROOM_S, spread=[0])
        except ValueError:
            needed = " and ".join(f"{num:g} {kind}" for kind, num in plan[0].items())
            free = ray.available_resources()
            have = " and ".join(f"{free.get(kind, 0):g} {kind}" for kind in plan[0])
            raise ValueError(
                f"no room for one more engine: it needs {needed} on {len(plan)} nodes, and Ray has"
                f" {have} free"
            ) from None
        return slots

    def start_colocated_served(self, role: str) -> list[str]:
        """Start a served model on the trainer ranks' GPUs; return its urls once it is healthy."""
        return self.served_engines.start_colocated(role, self._list_trainer_gpus())

    def _list_trainer_gpus(self) -> list[str]:
        """Return the GPUs of the trainer's ranks, in rank order."""
        assert self._trainer is not None
        return [gpu for of_rank in self._trainer.gpu_ids() for gpu in of_rank]

    def run_watched(self, work: Awaitable[Any]) -> Any:
        """Run `work` to its end and return the result.

        Raises RankError as soon as a rank or an engine is lost. A lost collector shows only when
        its samples are read, and a lost rank that can be recovered when it is called, or in
        `run_sampling`.
        """
        watches = self.served_engines.watches()
        models = () if self.recovers else (self._trainer, self._critic)
        for group in (*models, self._engines):
            if group is not None:
                watches.append(group.watch())
        return self.event_loop.run(guard(work, *watches))

    def run_sampling(self, work: Awaitable[Any]) -> Any:
        """Run work that needs no rank of trainer or critic, as `run_watched` does.

        Ranks that are lost meanwhile are recovered beside it, where that is possible.
        """
        if self.recover_beside_sampling is None:
            return self.run_watched(work)
        sampling = self.start_watched(work)
        lost: Future[None] | None = None
        try:
            while True:
                lost = self.event_loop.start(self._watch_models())
                wait([sampling, lost], return_when=FIRST_COMPLETED)
                if sampling.done():
                    return sampling.result()
                error = lost.exception()
                assert isinstance(error, Exception), "a watch ends by an error alone"
                self.recover_beside_sampling(error)
        finally:
            for future in filter(None, (sampling, lost)):
                future.cancel()

    async def _watch_models(self) -> None:
        """Never return; raise RankError once a rank of trainer or critic is gone."""
        models = (group for group in (self._trainer, self._critic) if group is not None)
        await guard(asyncio.Event().wait(), *(group.watch() for group in models))

    def start_watched(self, work: Awaitable[Any]) -> "Future[Any]":
        """Start `work` and return its future, which raises RankError if an engine is lost."""
        assert self._engines is not None
        watches = [self._engines.watch(), *self.served_engines.watches()]
        return self.event_loop.start(guard(work, *watches))


@contextmanager
def run_processes(
    config: Config,
    policy: ModelFacts,
    log_dir: Path,
    command: str,
    collector: CollectorSpec | None = None,
) -> Iterator[RunProcesses]:
    """Start Ray and the processes of ranks and engines; end all of them with the block.

    `collector`: how to build the collectors beside the engines; None if the command has no engines.

    Starts the recipe's served models that `command` needs. Raises ValueError if such a model cannot
    be started or found, or if the cluster is too small.
    """
    size = RunSize.make(config, command)
    remote = _find_remote(size.served)
    timeout_s = config.run.call_timeout_s
    num_cpus = size.num_cpus(config.cluster.cpus_per_rank)
    startup_s = config.run.startup_timeout_s
    naming = name_breakpoints() if config.run.debug else nullcontext()
    with (
        open_ray_session(config.cluster, num_cpus, startup_s),
        answer_in_controller(timeout_s),
        naming,
        open_outliving(config, command) as outliving,
    ):
        reserving = size, config.rollout, config.cluster, startup_s, outliving.run
        slots = outliving.slots or reserve_in_ray(*reserving)
        outliving.begin(slots, keys := outliving.keys or ServerKeys.make())
        for line in report_placement(slots, list_alive_nodes()):
            _log.info(line)
        trainer, critic = _start_models(config.run, config.profile, slots, log_dir, outliving)
        engines, collectors = _start_sampling(config, size, slots, log_dir, collector, outliving)
        served_engines = ServedEngines(
            size.served, slots.served, log_dir, timeout_s, remote, keys, size.colocated_served
        )
        started = (trainer, critic, engines, collectors)
        with _run_files(config.run, log_dir, started), closing(EventLoop()) as event_loop:
            yield RunProcesses(
                config, policy, log_dir, event_loop, started, served_engines, keys, outliving
            )
            if collectors is not None:
                collectors.close()


def _start_sampling(
    config: Config,
    size: RunSize,
    slots: RunSlots,
    log_dir: Path,
    collector: CollectorSpec | None,
    outliving: Outliving,
) -> tuple[EngineGroup | None, CollectorGroup | None]:
    """Start the processes of engines and collectors, as far as the command has any."""
    engines = None
    if size.engines:
        start, living = outliving.start, outliving.find_living("engines")
        apart = partial(EngineGroup, moves=True, start=start, living=living)
        make = ColocatedEngines if size.engines_colocated else apart
        least = config.rollout.min_engines
        engines = make(slots.engines, log_dir, config.run.call_timeout_s, min_engines=least)
    if collector is None:
        return engines, None
    served = config.served_groups.values()
    limits = _limit_collectors(config.run, config.rollout, config.reward, served)
    if size.engines_colocated and config.run.recovery.is_used:
        # There rollout.restarts is 0, as engines start in turn with the ranks.
        restarts = config.run.recovery.limit_restarts(size.trainer + size.critic)
        limits = replace(limits, restarts=restarts)
    collectors = CollectorGroup(slots.engines, log_dir, limits)
    collectors.start_build(collector)
    return engines, collectors


def _start_models(
    run: RunConfig, profile: ProfileConfig, slots: RunSlots, log_dir: Path, outliving: Outliving
) -> tuple[TrainerGroup | None, CriticGroup | None]:
    """Start the processes of trainer and critic, as far as there are slots for them."""
    start, keepers = outliving.start, outliving.find_keepers(run.call_timeout_s)
    timeout_s = run.call_timeout_s
    # Whoever debugs a rank stops it.
    stopped_s = None if run.debug else limit_stopped(timeout_s)
    nsys = make_nsys_environments(profile, log_dir.parent / "profile")
    trainer = critic = None
    if slots.trainer:
        living = outliving.find_living("trainer")
        trainer = TrainerGroup(slots.trainer, log_dir, timeout_s, nsys, stopped_s, start, living)
    if slots.critic:
        living = outliving.find_living("critic")
        critic = CriticGroup(slots.critic, log_dir, timeout_s, None, stopped_s, start, living)
    for group in filter(None, (trainer, critic)):
        if keepers is not None:
            group.find_kept_with(keepers)
    return trainer, critic


@contextmanager
def _run_files(run: RunConfig, log_dir: Path, groups: Groups) -> Iterator[None]:
    """Have nodes that do not see the run folder bring their files; see `bring_run_files`."""
    firsts: dict[str, Any] = {}
    for group in groups:
        if group is not None:
            firsts = {**group.first_of_nodes(), **firsts}
    with bring_run_files(
        log_dir.parent, firsts, run.startup_timeout_s, run.call_timeout_s
    ) as files:
        for models in groups[:2]:
            if models is not None:
                models.keep_files_with(files)
        yield


def _find_remote(models: Mapping[str, ServedModelConfig]) -> dict[str, ServedEndpoint]:
    """Return by role the models that run elsewhere. Raises ValueError if one cannot be found, or if
    another cannot be started.
    """
    for role, model in models.items():
        if model.path:
            check_served_path(role, model)
    return {role: find_endpoint(role, model) for role, model in models.items() if model.url}


def _limit_collectors(
    run: RunConfig,
    rollout: RolloutConfig,
    reward: RewardConfig,
    served: Iterable[ServedModelConfig],
) -> CollectorLimits:
    deadlines = Deadlines.from_options(run, rollout, reward, served)
    return CollectorLimits(
        call_timeout_s=run.call_timeout_s,
        hold_timeout_s=deadlines.hold,
        score_timeout_s=deadlines.score,
        startup_timeout_s=run.startup_timeout_s,
        restarts=rollout.restarts,
        stopped_s=None if run.debug else limit_stopped(run.call_timeout_s),
    )
