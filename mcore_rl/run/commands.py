"""Runs the commands: makes the roles of a loop, runs the loop, and fills the run folder."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import make_policy_loss, sft_loss
from mcore_rl.algo.preferences import needs_reference
from mcore_rl.checks.algorithm import find_unread_in_preference
from mcore_rl.cluster.adapter_slots import list_served_names
from mcore_rl.cluster.run import RunProcesses, run_processes
from mcore_rl.config import AlgorithmConfig, Config
from mcore_rl.config.secrets import dump_config
from mcore_rl.config.tree_checks import refuse
from mcore_rl.data.preferences import PreferenceStream, batches_of, load_pairs
from mcore_rl.data.sft import SftStream
from mcore_rl.data.tokenization import token_cache_dir
from mcore_rl.logs.ledger.file import NAME as LEDGER
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.logs.progress import tell_progress, tell_stage
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.logs.run_report import make_report
from mcore_rl.logs.token_rows import TokenTexts
from mcore_rl.loops.dpo import PreferenceOptions, optimize_preferences
from mcore_rl.loops.evaluation import evaluate
from mcore_rl.loops.pairs import sample_pairs, write_pairs
from mcore_rl.loops.rl import train
from mcore_rl.loops.roles import Roles, in_turn
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.loops.sft import fine_tune
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.host_memory import explain_servers
from mcore_rl.planning.recipe_models import read_critic
from mcore_rl.process.event_loop import run_both
from mcore_rl.process.log_files import rotate_logs
from mcore_rl.process.signals import handle_stops
from mcore_rl.run.engine_requests import serve_engine_requests
from mcore_rl.run.hub_upload import upload_export
from mcore_rl.run.images import sft_images
from mcore_rl.run.inputs import (
    check_sampling,
    list_prompt_options,
    open_policy,
    read_train_inputs,
    without_replay,
)
from mcore_rl.run.kept_start import Origin
from mcore_rl.run.next_start import (
    find_last_step,
    newest_step,
    tell_if_finished,
    tell_next_start,
    tell_start,
)
from mcore_rl.run.parts import (
    StartedRun,
    complete_saves,
    connect_stores,
    finish_run,
    finish_training,
    load_models,
    load_trainer,
    make_critic,
    make_log,
    make_packing,
    make_stored_trainer,
    make_sync,
    make_token_trainer,
    sample_in_background,
    share_teacher,
)
from mcore_rl.run.prompts import PromptReader, set_steps
from mcore_rl.run.recovery import TrainedModels, open_recovery, recover_run
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.booked import begin_books, keep_books
from mcore_rl.run.roles.colocation import SharingScorer, SharingTrainer
from mcore_rl.run.roles.generator import EngineGenerator
from mcore_rl.run.roles.kept_samples import describe_recipe
from mcore_rl.run.roles.turns import log_by_adapter
from mcore_rl.run.rollouts import collector_spec, connect_rollouts
from mcore_rl.run.startup import choose_checkpoint, start_training, wait_built
from mcore_rl.types import WeightVersion
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.recipe_checks import (
    check_factors,
    check_resumed,
    check_resumed_critic,
    refuse_several,
)
from mcore_rl.workers.collector_worker import CollectorSpec

_log = logging.getLogger(__name__)


def run_train(config: Config) -> None:
    """Run `mcore-rl train`; raise ValueError for wrong input before any process is started."""
    config = set_steps(config)
    if tell_if_finished(config, "train"):
        return
    with open_run(config) as (roles, start_step):
        train(config, roles, start_step)


@contextmanager
def open_run(config: Config) -> Iterator[tuple[Roles, int]]:
    """Start a run; yield the loop's roles and the step of their weights; then export and report."""
    config = set_steps(config)
    inputs = read_train_inputs(config)
    needs = needs_of(config.algorithm)
    running = _run(config, inputs.policy, "train", inputs.collector)
    with closing(inputs.prompts), running as (folder, origin, processes):
        started = start_training(config, processes, inputs.loss)
        books = RunLedger(folder.path / LEDGER, config.log.rotate_bytes)
        connected = config.rollout, config.reward, books
        rollouts = connect_rollouts(processes, started.engines, *connected)
        run = StartedRun(inputs.policy, folder, processes, started, rollouts)
        connect_stores(started, processes)
        parts = {"prompts": inputs.prompts, "advantages": inputs.advantages}
        start_step = load_models(config.checkpoint, started, folder, parts, origin, needs.reference)
        trainer = make_stored_trainer(config, run)
        weights = make_sync(config, run, trainer, start_step, inputs.turns)
        weights.sync_first(WeightVersion(start_step), inputs.parity_probe)
        shown = rollouts.read, inputs.to_texts, needs
        log = make_log(config, folder, config.run.steps, start_step, *shown)
        booked = begin_books(config, inputs.prompts, books, start_step)
        drawn = SamplingOptions.make(config.rollout, config.reward, config.algorithm)
        recipe = describe_recipe(dump_config(config))
        sampling = drawn, config.run.seed, run, start_step, booked, weights, log.episodes, recipe
        estimate = StoredAdvantages(inputs.advantages, rollouts.apply, has_teacher=needs.teacher)
        drawing = config.rollout, config.eval, log.episodes, weights.revive
        keeping = recover_run(config.run, run, weights, inputs.advantages, start_step, needs)
        with complete_saves(folder, started.trainer, started.critic), keeping as recovery:
            stopping = handle_stops(config.run.grace_s)
            answering = serve_engine_requests(run, config.rollout.request_timeout_s)
            with books, log, sample_in_background(*sampling) as background, answering, stopping:
                roles = Roles(
                    prompts=booked,
                    held_out=inputs.held_out,
                    generator=rollouts.make_generator(*drawing, recovery, weights.prepare),
                    reward=SharingScorer(rollouts.reward, ("judge", "reward_model"), started.gpus),
                    advantages=estimate,
                    trainer=SharingTrainer(trainer, started.gpus),
                    weights=weights,
                    log=log_by_adapter(log, inputs.turns),
                    background=background,
                    teacher=share_teacher(rollouts, started.gpus),
                    on_tokens=rollouts.apply,
                    critic=make_critic(config.critic, config.train, config.checkpoint, run),
                    both=in_turn if config.critic.colocated else run_both,
                    recovery=recovery,
                )
                yield keep_books(roles, books), start_step
            recovery.repeat(partial(finish_run, config.checkpoint, started, folder))
    make_report(folder.path)


def run_sft(config: Config) -> None:
    """Run `mcore-rl sft`: fine-tune model.path, or random weights; write <run.dir>/hf."""
    if tell_if_finished(config, "sft"):
        return
    refuse_several(config.train.lora, "mcore-rl sft")
    needed = {"sft.data": config.sft.data}
    policy, tokenizer = open_policy(config.model, config.algorithm, config.run.dir, needed)
    config = replace(config, train=without_replay(config.train, config.model, policy))
    check_factors(config.train.lora, config.model, policy, config.run.seed)
    options = config.sft
    cache_dir = token_cache_dir(config.data.cache_dir)
    images = sft_images(config.model.path, config.data, tokenizer, options.max_len)
    batches = SftStream(
        options.data, tokenizer, options.max_len, config.run.seed, cache_dir, images
    )
    with _run(config, policy, "sft") as (folder, origin, processes):
        trainer = processes.start_trainer(options.optimizer, options.steps, sft_loss)
        wait_built(trainer)
        start_step = load_trainer(trainer, config.checkpoint, {"prompts": batches}, origin)
        packing = make_packing(config.parallel, config.train, policy)
        how = packing, config.checkpoint, options.optimizer
        packed = make_token_trainer(trainer, folder, *how)
        log = make_log(config, folder, options.steps, start_step)
        trained = TrainedModels((trainer,))
        keeping = open_recovery(config.run, processes, folder, trained, start_step)
        with complete_saves(folder, trainer), keeping as recovery:
            with log, handle_stops(config.run.grace_s):
                fine_tune(options, config.checkpoint, batches, packed, log, start_step, recovery)
            recovery.repeat(partial(finish_training, config.checkpoint, trainer, folder))
    print(folder.export)


def run_dpo(config: Config) -> None:
    """Run `mcore-rl dpo`: train model.path on preferences; write <run.dir>/hf."""
    if tell_if_finished(config, "dpo"):
        return
    refuse_several(config.train.lora, "mcore-rl dpo")
    refuse(config, find_unread_in_preference(config.algorithm.preference))
    needed = {"dpo.data": config.dpo.data}
    policy, tokenizer = open_policy(config.model, config.algorithm, config.run.dir, needed)
    config = replace(config, train=without_replay(config.train, config.model, policy))
    check_factors(config.train.lora, config.model, policy, config.run.seed)
    options = config.dpo
    cache_dir = token_cache_dir(config.data.cache_dir)
    pairs = load_pairs(options.data, tokenizer, options.max_len, cache_dir)
    stream = PreferenceStream(pairs, config.run.seed)
    held_out = []
    if options.held_out:
        held_out = load_pairs(options.held_out, tokenizer, options.max_len, cache_dir)
    batches = batches_of(held_out, options.batch_size)
    preference = config.algorithm.preference
    preferences = PreferenceOptions(options, preference, config.checkpoint, config.eval.every_steps)
    loss = make_policy_loss(AlgorithmConfig(loss="policy_gradient", preference=preference))
    with _run(config, policy, "dpo") as (folder, origin, processes):
        trainer = processes.start_trainer(options.optimizer, options.steps, loss)
        wait_built(trainer)
        with_reference = needs_reference(preference)
        goes_on_from = {"pairs": stream}, origin, with_reference
        start_step = load_trainer(trainer, config.checkpoint, *goes_on_from)
        snapshot = trainer.snapshot_reference if with_reference else None
        packing = make_packing(config.parallel, config.train, policy)
        how = packing, config.checkpoint, options.optimizer
        packed = make_token_trainer(trainer, folder, *how)
        log = make_log(config, folder, options.steps, start_step)
        trained = TrainedModels((trainer,), prepare=snapshot)
        keeping = open_recovery(config.run, processes, folder, trained, start_step)
        with complete_saves(folder, trainer), keeping as recovery:
            with log, handle_stops(config.run.grace_s):
                optimize_preferences(
                    preferences, stream, batches, packed, log, start_step, recovery
                )
            recovery.repeat(partial(finish_training, config.checkpoint, trainer, folder))
    print(folder.export)


def run_pairs(config: Config) -> None:
    """Run `mcore-rl pairs`: sample responses to data.train and eval.data.

    Preferences among the responses are written to <run.dir>/pairs.
    """
    needed = list_prompt_options(config.data)
    policy, tokenizer = open_policy(config.model, config.algorithm, config.run.dir, needed)
    check_sampling(config, policy)
    adapters = list_served_names(config.train.lora, has_trainer=False)
    collector = collector_spec(config, policy, tokenizer, adapters)
    reader = PromptReader.make(config, tokenizer)
    splits = {
        "train": reader.take_first(config.dpo.prompts),
        "heldout": reader.load_held_out(),
    }
    num_samples = config.rollout.samples_per_prompt
    num_pairs = config.dpo.pairs_per_prompt
    with _run(config, policy, "pairs", collector) as (folder, _, processes):
        engines = processes.start_engines()
        rollouts = connect_rollouts(processes, engines, config.rollout, config.reward)
        generator = EngineGenerator(rollouts.client, config.rollout, processes.run_watched)
        for name, prompts in splits.items():
            if prompts:
                rows = sample_pairs(
                    generator,
                    rollouts.reward,
                    prompts,
                    num_samples,
                    num_pairs,
                    config.run.seed,
                    config.reward,
                    rollouts.read,
                )
                write_pairs(rows, folder.path / f"{name}.parquet", len(prompts))


def run_eval(config: Config) -> None:
    """Run `mcore-rl eval`: evaluate model.path without a trainer; write <run.dir>/eval."""
    needed = {} if config.eval.sets else {"eval.data": config.eval.data}
    policy, tokenizer = open_policy(config.model, config.algorithm, config.run.dir, needed)
    check_sampling(config, policy)
    adapters = list_served_names(config.train.lora, has_trainer=False)
    collector = collector_spec(config, policy, tokenizer, adapters)
    held_out = PromptReader.make(config, tokenizer).load_held_out()
    with _run(config, policy, "eval", collector) as (folder, _, processes):
        engines = processes.start_engines()
        rollouts = connect_rollouts(processes, engines, config.rollout, config.reward)
        with make_log(config, folder, None, 0, rollouts.read, TokenTexts(tokenizer)) as log:
            generator = rollouts.make_generator(config.rollout, config.eval, log.episodes)
            metrics, greedy = evaluate(
                generator,
                held_out,
                rollouts.reward,
                config.eval,
                config.reward,
                seed=config.run.seed,
            )
            log.log(0, metrics)
            log.log_samples(0, greedy.samples, greedy.scores, split="eval")
    print(folder.path)


@contextmanager
def _run(
    config: Config,
    policy: ModelFacts,
    command: str,
    collector: CollectorSpec | None = None,
) -> Iterator[tuple[RunFolder, Origin, RunProcesses]]:
    """Yield the run folder, what the command goes on from, and the processes of the run."""
    size = RunSize.make(config, command)
    path = Path(config.run.dir)
    folder = RunFolder(path if size.trainer else path / command, has_critic=size.critic > 0)
    with folder.lock():
        written = dump_config(config)
        rotate_bytes = config.log.rotate_bytes
        resumes = bool(config.run.resume)
        found = folder.prepare(written, resume=resumes, rotate_bytes=rotate_bytes)
        newest = choose_checkpoint(folder, found, config.run.resume)
        if size.trainer and newest is not None:
            check_resumed(newest, config.train.lora, config.model, policy, config.run.seed)
        if size.critic and newest is not None:
            critic = read_critic(config.critic.path, policy)
            saved = folder.find_critic(newest), config.critic.lora
            check_resumed_critic(*saved, config.model, critic, config.run.seed)
        last_step = find_last_step(config, command)
        if collector is not None and (line := explain_servers(config.sandbox, config.search)):
            _log.info(line)
        _log.info("start-up")
        with (
            rotate_logs(rotate_bytes),
            tell_progress(config.log.console),
            tell_next_start(folder, last_step, resumes) if last_step else nullcontext(),
        ):
            started = run_processes(config, policy, folder.logs, command, collector)
            with ExitStack() as stack:
                with tell_stage("start-up: Ray", is_told=True):
                    processes = stack.enter_context(started)
                positions = processes.outliving.positions
                origin = Origin.find(newest, newest_step(folder), positions)
                tell_start(folder, origin, last_step)
                yield folder, origin, processes
            if size.trainer and config.checkpoint.hub_repo:
                upload_export(config.checkpoint.hub_repo, folder.export, last_step)


COMMANDS: Mapping[str, Callable[[Config], None]] = {
    "sft": run_sft,
    "dpo": run_dpo,
    "pairs": run_pairs,
    "train": run_train,
    "eval": run_eval,
}
