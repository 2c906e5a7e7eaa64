"""Makes the roles of loops from a recipe and the processes of its run."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_rl.algo.diagnostics import find_warn_bound
from mcore_rl.algo.registry import Needs
from mcore_rl.cluster.answers import RankError
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.cluster.rank_actor import node_address
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import (
    AlarmsConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    DriftConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.config.secrets import dump_config
from mcore_rl.logs.alarms.conditions import MetricAlarm, list_alarms, list_of_training
from mcore_rl.logs.alarms.watch import AlarmWatch
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.progress import look, say, tell_stage
from mcore_rl.logs.prometheus.server import PrometheusServer
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.logs.token_rows import TokenTexts
from mcore_rl.logs.trackers.open import open_trackers
from mcore_rl.logs.trackers.tracker import TrackedRun
from mcore_rl.loops.roles import AskTeacher, Critic, ReadSamples
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.planning.recipe_models import make_critic_training, read_critic
from mcore_rl.process.signals import StoppedEarlyError, TerminatedError
from mcore_rl.run.images import image_marks
from mcore_rl.run.kept_start import Origin
from mcore_rl.run.links import make_links, make_record
from mcore_rl.run.roles.background import BackgroundSampler
from mcore_rl.run.roles.colocation import (
    ALL,
    CRITIC,
    TRAINER,
    SharedGpus,
    SharingCritic,
    SharingScorer,
)
from mcore_rl.run.roles.failed_saves import (
    note_failed_saves,
    prune_if_possible,
    refuse_lost_end,
)
from mcore_rl.run.roles.groups import OpenPrompts
from mcore_rl.run.roles.kept_samples import KeptSamples
from mcore_rl.run.roles.parity_check import ParityCheck
from mcore_rl.run.roles.parity_tolerance import ParityTolerance, describe_kernels
from mcore_rl.run.roles.skipped_steps import SkippedSteps
from mcore_rl.run.roles.trainer import (
    PackedCritic,
    PackedStoredTrainer,
    PackedTokenTrainer,
    Packing,
    TrainSpeed,
)
from mcore_rl.run.roles.turns import TurnOrder, TurnSync
from mcore_rl.run.roles.weight_sync import EngineSync
from mcore_rl.run.rollouts import Rollouts
from mcore_rl.run.startup import Started
from mcore_rl.types import WeightVersion
from mcore_rl.weight_sync.controller.factor_sync import choose_factors
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops
from mcore_rl.weights.models.value_head import add_value_head

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedRun:
    """A training run whose processes have started, and where it writes."""

    policy: ModelFacts
    folder: RunFolder
    processes: RunProcesses
    started: Started
    rollouts: Rollouts


def make_token_trainer(
    trainer: TrainerGroup,
    folder: RunFolder,
    packing: Packing,
    checkpoint: CheckpointConfig,
    optimizer: OptimizerConfig,
) -> PackedTokenTrainer:
    """Return a trainer of TrainBatches that measures its speed; the ranks must be built."""
    speed = _time_steps(trainer, packing)
    packed = PackedTokenTrainer(
        trainer,
        folder,
        packing=packing,
        temperature=1.0,
        checkpoint=checkpoint,
        speed=speed,
        skipped=SkippedSteps(folder, "policy", optimizer.max_nonfinite),
        export=trainer.export_hf,
    )
    trainer.tell_resized(packed.fit)
    return packed


def make_packing(parallel: ParallelConfig, train: TrainConfig, model: ModelFacts) -> Packing:
    """Return how sequences become micro-batches: by the work that each gives the model."""
    trained = model.choose_trained(train.mtp_loss)
    return Packing.from_config(parallel, train, ModelFlops.from_facts(trained))


def make_stored_trainer(config: Config, run: StartedRun) -> PackedStoredTrainer:
    """Return a trainer of StoredBatches, which computes log-probs at the rollout's temperature."""
    trainer = run.started.trainer
    packing = make_packing(config.parallel, config.train, run.policy)
    packed = PackedStoredTrainer(
        trainer,
        run.folder,
        packing=packing,
        temperature=config.rollout.temperature,
        checkpoint=config.checkpoint,
        speed=_time_steps(trainer, packing),
        skipped=_note_skipped(run, "policy", config.train.optimizer),
        export=trainer.export_hf,
    )
    trainer.tell_resized(packed.fit)
    return packed


def _note_skipped(run: StartedRun, model: str, optimizer: OptimizerConfig) -> SkippedSteps:
    return SkippedSteps(run.folder, model, optimizer.max_nonfinite, run.rollouts.fetch)


def _time_steps(trainer: TrainerGroup, packing: Packing) -> TrainSpeed:
    assert packing.flops is not None, "a run packs by the work of its sequences"
    return TrainSpeed(packing.flops, trainer.world_size, trainer.peak_flops())


def make_critic(
    options: CriticConfig,
    train: TrainConfig,
    checkpoint: CheckpointConfig,
    run: StartedRun,
) -> Critic | None:
    """Return the critic of the loop; None if the run has none."""
    started = run.started
    if started.critic is None:
        return None
    model = read_critic(options.path, run.policy)
    facts = replace(model, config=add_value_head(model.config))
    own = make_critic_training(train, options)
    packing = make_packing(options.parallel, own, facts)
    skipped = _note_skipped(run, "critic", options.optimizer)
    critic = PackedCritic(
        started.critic, run.folder, packing=packing, checkpoint=checkpoint, skipped=skipped
    )
    started.critic.tell_resized(critic.fit)
    return SharingCritic(critic, started.gpus) if options.colocated else critic


def share_teacher(rollouts: Rollouts, gpus: SharedGpus) -> AskTeacher | None:
    """Return the teacher, which may share GPUs with other models; None if there is none."""
    return SharingScorer(rollouts.ask_teacher, ("teacher",), gpus) if rollouts.has_teacher else None


def connect_stores(started: Started, processes: RunProcesses) -> None:
    """Tell the ranks of trainer and critic where samples lie."""
    assert processes.collectors is not None
    for group in (started.trainer, started.critic):
        if group is not None:
            group.connect_stores(processes.collectors.stores)


def make_sync(
    config: Config,
    run: StartedRun,
    trainer: PackedStoredTrainer,
    start_step: int,
    turns: TurnOrder | None = None,
) -> EngineSync:
    """Return the weight sync to the engines, with its parity check.

    start_step   as load_models returned it; `turns` of several adapters begin after it
    """
    started, folder, keys = run.started, run.folder, run.processes.keys
    seed = config.run.seed
    engines, gpus = started.engines, started.gpus
    links = make_links(
        config.model,
        config.parallel,
        config.rollout,
        config.sync,
        run.policy,
        started.trainer,
        keys=keys,
        host=node_address(),
        timeout_s=config.run.call_timeout_s,
        start_step=start_step,
        is_colocated=config.cluster.colocated,
        is_rounded=config.train.fake_quantization != "none",
        factors=choose_factors(config.train.lora, config.model, config.rollout, run.policy, seed),
    )
    started.trainer.tell_resized(
        lambda smaller: links.record_by(
            make_record(config.model, smaller, config.rollout, run.policy)
        )
    )
    devices = started.trainer.device_names()
    made_by = describe_kernels(config.model, config.rollout, config.train, devices)
    parity_check = ParityCheck(
        _make_scorer(config, run),
        config.parity_check,
        ParityTolerance(config.parity_check, config.engine_precision, folder.parity_check, made_by),
        config.run.call_timeout_s,
        gpus.for_rollout,
        keys,
        run.rollouts.fetch,
        image_marks(run.policy),
    )
    parts = links, parity_check, engines.health, engines.look, run.processes.run_watched, gpus
    weights = TurnSync(*parts, count_steps=lambda: trainer.num_steps)
    weights.begin_turns(turns, start_step + 1, (started.trainer, links, parity_check))
    return weights


def _make_scorer(config: Config, run: StartedRun) -> PackedTokenTrainer:
    """Return what scores the parity check's sequences."""
    scorer = PackedTokenTrainer(
        run.started.trainer,
        run.folder,
        packing=make_packing(config.parallel, config.train, run.policy),
        temperature=1.0,
        checkpoint=config.checkpoint,
    )
    run.started.trainer.tell_resized(scorer.fit)
    return scorer


def sample_in_background(
    options: SamplingOptions,
    seed: int,
    run: StartedRun,
    start_step: int,
    prompts: OpenPrompts,
    weights: EngineSync,
    episodes: EpisodeLog,
    recipe: str,
) -> AbstractContextManager[BackgroundSampler | None]:
    """Return the sampler that draws samples while the trainer trains.

    seed     run.seed
    recipe   what samples depend on; see describe_recipe

    With rollout.mode=sync, return a context manager that yields None.
    """
    if options.rollout.mode == "sync":
        return nullcontext()
    kept = KeptSamples(run.folder.kept_samples, recipe, run.rollouts, start_step)
    return BackgroundSampler(
        options,
        seed,
        WeightVersion(start_step),
        prompts,
        run.rollouts.client,
        run.rollouts.score,
        run.processes.run_sampling,
        run.processes.start_watched,
        weights.revive,
        episodes,
        run.rollouts.ledger,
        kept,
    )


def load_models(
    checkpoint: CheckpointConfig,
    started: Started,
    folder: RunFolder,
    parts: Mapping[str, Any],
    origin: Origin,
    with_reference: bool,
) -> int:
    """Bring trainer, critic and `parts` to the state that the command goes on from, if any.

    Before that, copy the reference from the weights that the run began with. Returns the step to
    continue after.
    """
    started.gpus.load(TRAINER, ALL)
    models = [model for model in (started.trainer, started.critic) if model is not None]
    held = origin.find_held(models)
    if with_reference:
        started.trainer.snapshot_reference()
    if held:
        origin.restore(models, parts, lambda role: started.gpus.load(role, ALL))
        return held
    with tell_stage("start-up: checkpoint", is_told=origin.newest is not None):
        start_step = load_checkpoint(started.trainer, checkpoint, parts, origin.newest)
    if started.critic is not None and start_step:
        started.gpus.load(CRITIC, ALL)
        saved = str(folder.critic_checkpoint(start_step))
        started.critic.load(saved, verify=checkpoint.verify)
    return start_step


def load_trainer(
    trainer: TrainerGroup,
    checkpoint: CheckpointConfig,
    parts: Mapping[str, Any],
    origin: Origin,
    with_reference: bool = False,
) -> int:
    """Do as load_models for a command that trains one model without engines."""
    held = origin.find_held([trainer])
    if with_reference:
        trainer.snapshot_reference()
    if held:
        origin.restore([trainer], parts)
        return held
    return load_checkpoint(trainer, checkpoint, parts, origin.newest)


def load_checkpoint(
    trainer: TrainerGroup,
    checkpoint: CheckpointConfig,
    parts: Mapping[str, Any],
    newest: Path | None,
) -> int:
    """Load the trainer and `parts`, by their names in the saved state, from `newest`.

    Returns the step to continue after, 0 without a checkpoint. Raises ValueError if the checkpoint
    holds no state of a run.
    """
    if newest is None:
        return 0
    state = trainer.load(str(newest), verify=checkpoint.verify)
    if not state:
        raise ValueError(
            f"{newest} holds a model without the state of a run: choose its HuggingFace directory"
            " as model.path instead, and another run.dir"
        )
    for name, part in parts.items():
        part.load_state_dict(state[name])
    print(f"resumed from {newest}")
    return state["step"]


def make_log(
    config: Config,
    folder: RunFolder,
    total_steps: int | None,
    start_step: int,
    read: ReadSamples | None = None,
    to_texts: TokenTexts | None = None,
    needs: Needs | None = None,
) -> MetricsLogger:
    """Return the log of a run.

    read       fetches the samples that the log shows, if there are any
    to_texts   the texts of their tokens
    needs      those of an algorithm of reinforcement learning
    """
    log = config.log
    last_step = start_step or None
    alarms = list_of_training(config.alarms)
    if needs is not None:
        precision = config.engine_precision
        alarms = _list_alarms(config.alarms, config.rollout, config.drift, precision, needs)
    return MetricsLogger(
        folder.path,
        last_step=last_step,
        total_steps=total_steps,
        console=log.console,
        trackers=open_trackers(
            log, TrackedRun(folder.path, last_step, log.tracking, dump_config(config))
        ),
        tracked_samples=log.tracking.samples,
        read=read,
        to_texts=to_texts,
        token_samples=log.token_samples,
        with_episodes=config.agents.is_used,
        rotate_bytes=log.rotate_bytes,
        alarms=AlarmWatch(folder.path, alarms, config.alarms, last_step, log.rotate_bytes),
        prometheus=_serve_metrics(folder.path.name, log, total_steps),
    )


def _serve_metrics(run: str, log: LogConfig, total_steps: int | None) -> PrometheusServer | None:
    if log.prometheus_port is None:
        return None
    return PrometheusServer(run, log.prometheus_host, log.prometheus_port, total_steps)


def _list_alarms(
    alarms: AlarmsConfig,
    rollout: RolloutConfig,
    drift: DriftConfig,
    engine_precision: str,
    needs: Needs,
) -> list[MetricAlarm]:
    """Return the alarms of a run of reinforcement learning, with the bounds of its recipe."""
    return list_alarms(
        alarms,
        max_response_len=rollout.max_response_len,
        compares_groups=needs.others,
        reads_rewards=not needs.teacher,
        drift_bound=find_warn_bound(drift, engine_precision, is_stale=rollout.mode != "sync"),
    )


SAVE_AFTER_ERROR_S = 30.0
"""How long a run that failed waits for a checkpoint that was begun."""


@contextmanager
def complete_saves(
    folder: RunFolder, trainer: TrainerGroup, critic: CriticGroup | None = None
) -> Iterator[None]:
    """Complete the save in progress, if there is one, before an error or a signal ends the block.

    A second Ctrl-C or SIGTERM ends that, too. After SIGTERM, whoever sent it kills before long, so
    the save has a deadline. After an error of the ranks themselves the checkpoint is lost.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, TerminatedError) as stop:
        unsaved = [
            step
            for step in folder.begun_steps
            if not folder.is_saved(step) and step not in folder.failed_saves
        ]
        if not unsaved:
            raise
        is_failure = not isinstance(stop, StoppedEarlyError | KeyboardInterrupt)
        again = "another SIGTERM" if isinstance(stop, TerminatedError) else "Ctrl-C"
        say(f"completing the checkpoint of step {unsaved[-1]}; {again} drops it")
        with suppress(RankError) if is_failure else nullcontext():
            for group in (critic, trainer):
                if group is not None:
                    failed = group.finish_save(SAVE_AFTER_ERROR_S if is_failure else None)
                    note_failed_saves(folder, failed)
        look()
        raise


def finish_training(checkpoint: CheckpointConfig, trainer: TrainerGroup, folder: RunFolder) -> None:
    """Complete the save in progress; export the weights if the recipe says so."""
    with tell_stage("completing the last checkpoint"):
        note_failed_saves(folder, trainer.finish_save())
    look()
    prune_if_possible(folder, checkpoint)
    if checkpoint.export_hf:
        _log.info("export")
        with tell_stage("export", is_told=True):
            trainer.export_hf(str(folder.export))
    refuse_lost_end(folder)


def finish_run(checkpoint: CheckpointConfig, started: Started, folder: RunFolder) -> None:
    """Complete the saves in progress; export critic and trainer if the recipe says so."""
    started.gpus.offload_models()
    if started.critic is not None:
        note_failed_saves(folder, started.critic.finish_save())
        if checkpoint.export_hf:
            started.critic.export_hf(str(folder.critic_export))
    finish_training(checkpoint, started.trainer, folder)
