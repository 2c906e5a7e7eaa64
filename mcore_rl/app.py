"""What the commands do: a checked Config in, a run folder out; parts are made here and handed to loops."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.algo.build import Advantages, make_policy_loss, sft_loss
from mcore_rl.background import BackgroundSampler
from mcore_rl.canary import Canary
from mcore_rl.cluster.critic import CriticGroup
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.host import node_address
from mcore_rl.cluster.run import RunProcesses, experts_shape, run_processes
from mcore_rl.cluster.trainer import TrainerGroup
from mcore_rl.colocation import ALL, CRITIC, TRAINER, SharedGpus, SharingCritic, SharingTrainer
from mcore_rl.config import AlgorithmConfig, Config, ModelConfig
from mcore_rl.data.preferences import PreferenceStream, batches_of, load_pairs
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.sft import SftStream
from mcore_rl.data.source import ShuffledStream
from mcore_rl.dpo import optimise_preferences
from mcore_rl.engine_sync import EngineSync
from mcore_rl.evaluation import evaluate
from mcore_rl.loop import train
from mcore_rl.metrics import MetricsLogger
from mcore_rl.pairs import sample_pairs, write_pairs
from mcore_rl.planning import record_layouts
from mcore_rl.players import EngineGenerator, PackedCritic, PackedTrainer, Packing, at_once
from mcore_rl.recipe import require
from mcore_rl.report import make_report
from mcore_rl.rewards.questions import JudgeQuestion, Question, RewardModelQuestion
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.roles import Critic, Roles, in_turn
from mcore_rl.rollout.asking import ServedClient
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.served import ServedModel
from mcore_rl.rollout.teacher import Teacher, check_same_vocabulary
from mcore_rl.run_folder import RunFolder
from mcore_rl.sft import fine_tune
from mcore_rl.slices.carried import carried_tensors
from mcore_rl.slices.families.value_head import has_value_head
from mcore_rl.slices.hf_config import read_hf_config
from mcore_rl.slices.hf_files import open_hf_dir
from mcore_rl.slices.routing import check_routing
from mcore_rl.startup import start_training
from mcore_rl.stream.refit import Refitter
from mcore_rl.types import Prompt, WeightVersion

_log = logging.getLogger(__name__)


def run_train(config: Config) -> None:
    """`mcore-rl train`: everything that can be refused is refused before a process is started."""
    tokenizer = _open(config, "data.train")
    check_routing(config.train, read_hf_config(config.model.path))
    prompts = ShuffledStream(
        _load(config, config.data.train, tokenizer), config.run.seed, config.data.shuffle
    )
    held_out = _load(config, config.eval.data, tokenizer)[: config.eval.max_prompts]
    scorer = _make_scorer(config)
    loss = make_policy_loss(config.algorithm)
    advantages = Advantages(config.algorithm, config.reward.part_weights, config.critic.gae_lambda)
    if config.has_critic:
        _check_critic(config)
    _check_lens(config)
    if config.teacher.path:
        _check_teacher(config, tokenizer)
    with (
        _run(
            config, with_engines=True, with_trainer=True, served=("judge", "reward_model", "teacher")
        ) as run,
        scorer,
    ):
        folder, newest, processes = run
        started = start_training(config, processes, loss)
        trainer, critic, engines, gpus = started.trainer, started.critic, started.engines, started.gpus
        others = _connect(scorer, processes)
        gpus.take(TRAINER, ALL)
        if config.algorithm.needs_reference:
            trainer.snapshot_reference()
        start_step = _resume(trainer, {"prompts": prompts, "advantages": advantages}, newest)
        if critic is not None and start_step:
            gpus.take(CRITIC, ALL)
            critic.load(str(folder.critic_checkpoint(start_step)))
        client = _make_client(config, engines, tokenizer)
        refitter = Refitter(
            trainer,
            host=node_address(),
            bucket_mib=config.sync.bucket_mib,
            timeout_s=config.run.call_timeout_s,
            staged=config.rollout.stage_weights,
            relay=config.sync.relay,
            record=partial(record_layouts, config),
        )
        packed, watched = _pack(config, trainer, folder, config.rollout.temperature), processes.watched
        canary = Canary(
            packed, config.canary, config.model.dtype, config.run.call_timeout_s, watched, gpus.for_rollout
        )
        weights = EngineSync(refitter, canary, engines.rotation, engines.look, watched, gpus)
        weights.sync(WeightVersion(start_step))
        background = _sample_beside(config, start_step, prompts, client, scorer, processes, weights)
        with _make_log(config, folder, config.run.steps, start_step) as log, background as beside:
            roles = Roles(
                prompts=prompts,
                held_out=held_out,
                generator=EngineGenerator(client, config.rollout, watched, weights.revive),
                reward=scorer,
                advantages=advantages,
                trainer=SharingTrainer(packed, gpus),
                weights=weights,
                log=log,
                background=beside,
                teacher=Teacher(others["teacher"], watched) if "teacher" in others else None,
                critic=critic and _make_critic(config, critic, folder, gpus),
                both=in_turn if config.critic.colocated else at_once,
            )
            train(config, roles, start_step)
        if critic is not None:
            with gpus.beside_engines(CRITIC):
                critic.finish_save()
                if config.checkpoint.export_hf:
                    critic.export_hf(str(folder.critic_export))
        with gpus.beside_engines(TRAINER):
            _finish(config, trainer, folder)
    make_report(folder.path)


def run_sft(config: Config) -> None:
    """`mcore-rl sft`: from the weights in model.path, or from random ones, to <run.dir>/hf."""
    tokenizer = _open(config, "sft.data")
    config = _without_replay(config)
    batches = SftStream(config.sft.data, tokenizer, config.sft.max_len, config.run.seed)
    with _run(config, with_trainer=True) as (folder, newest, processes):
        trainer = processes.start_trainer(config.sft.optimizer, config.sft.steps, sft_loss)
        trainer.wait_built()
        start_step = _resume(trainer, {"prompts": batches}, newest)
        with _make_log(config, folder, config.sft.steps, start_step) as log:
            fine_tune(config, batches, _pack(config, trainer, folder), log, start_step)
        _finish(config, trainer, folder)
    print(folder.export)


def run_dpo(config: Config) -> None:
    """`mcore-rl dpo`: preference optimisation of the weights in model.path, to <run.dir>/hf."""
    tokenizer = _open(config, "dpo.data")
    config = _without_replay(config)
    options = config.dpo
    stream = PreferenceStream(load_pairs(options.data, tokenizer, options.max_len), config.run.seed)
    held_out = load_pairs(options.held_out, tokenizer, options.max_len) if options.held_out else []
    batches = batches_of(held_out, options.batch_size)
    loss = make_policy_loss(AlgorithmConfig(loss="policy_gradient", preference=config.algorithm.preference))
    with _run(config, with_trainer=True) as (folder, newest, processes):
        trainer = processes.start_trainer(options.optimizer, options.steps, loss)
        trainer.wait_built()
        if config.algorithm.preference.needs_reference:
            trainer.snapshot_reference()
        start_step = _resume(trainer, {"pairs": stream}, newest)
        with _make_log(config, folder, options.steps, start_step) as log:
            optimise_preferences(config, stream, batches, _pack(config, trainer, folder), log, start_step)
        _finish(config, trainer, folder)
    print(folder.export)


def run_pairs(config: Config) -> None:
    """`mcore-rl pairs`: preferences among responses to data.train and eval.data, to <run.dir>/pairs."""
    _check_no_trainer(config)
    tokenizer = _open(config, "data.train")
    splits = {
        "train": _load(config, config.data.train, tokenizer)[: config.dpo.prompts or None],
        "heldout": _load(config, config.eval.data, tokenizer)[: config.eval.max_prompts],
    }
    scorer = _make_scorer(config)
    num_samples, num_pairs = config.rollout.samples_per_prompt, config.dpo.pairs_per_prompt
    served = ("judge", "reward_model")
    with _run(config, "pairs", with_engines=True, served=served) as (folder, _, processes), scorer:
        client = _make_client(config, processes.start_engines(), tokenizer)
        _connect(scorer, processes)
        generator = EngineGenerator(client, config.rollout, processes.watched)
        for name, prompts in splits.items():
            if prompts:
                rows = sample_pairs(generator, scorer, prompts, num_samples, num_pairs, config.run.seed)
                write_pairs(rows, folder.path / f"{name}.parquet", len(prompts))


def run_eval(config: Config) -> None:
    """`mcore-rl eval`: engines alone, on the weights in model.path; the numbers go to <run.dir>/eval."""
    _check_no_trainer(config)
    tokenizer = _open(config, "eval.data")
    held_out = _load(config, config.eval.data, tokenizer)[: config.eval.max_prompts]
    scorer = _make_scorer(config)
    served = ("judge", "reward_model")
    with _run(config, "eval", with_engines=True, served=served) as (folder, _, processes), scorer:
        client = _make_client(config, processes.start_engines(), tokenizer)
        _connect(scorer, processes)
        generator = EngineGenerator(client, config.rollout, processes.watched)
        with _make_log(config, folder, None, 0) as log:
            metrics, samples, scores = evaluate(generator, held_out, scorer, config.eval, config.run.seed)
            log.log(0, metrics)
            log.log_samples(0, samples, scores, split="eval")
    print(folder.path)


@contextmanager
def _run(
    config: Config,
    subfolder: str = ".",
    *,
    with_engines: bool = False,
    with_trainer: bool = False,
    served: Sequence[str] = (),
) -> Iterator[tuple[RunFolder, Path | None, RunProcesses]]:
    """The prepared run folder, the checkpoint to continue from, and the processes of the run."""
    folder = RunFolder(Path(config.run.dir) / subfolder, with_trainer and config.has_critic)
    newest = folder.prepare(config)
    _log.info("start-up")
    with run_processes(
        config, folder.logs, with_engines=with_engines, with_trainer=with_trainer, served=served
    ) as processes:
        yield folder, newest, processes


def _sample_beside(
    config: Config,
    start_step: int,
    prompts: ShuffledStream[Prompt],
    client: RolloutClient,
    scorer: Scorer,
    processes: RunProcesses,
    weights: EngineSync,
) -> AbstractContextManager[BackgroundSampler | None]:
    """What samples beside training, if the recipe wants that."""
    if config.rollout.mode == "sync":
        return nullcontext()
    version = WeightVersion(start_step)
    watched, start = processes.watched, processes.start_watched
    return BackgroundSampler(config, version, prompts, client, scorer, watched, start, weights.revive)


def _open(config: Config, *needed: str) -> PreTrainedTokenizerBase:
    """The tokenizer; ValueError if a leaf of `needed` is empty or the model cannot be what the run needs."""
    require(config, *needed, "run.dir", "model.path")
    return _open_model(config.model)


def _without_replay(config: Config) -> Config:
    """For sequences that no engine sampled: nobody knows their experts. ValueError: see check_routing."""
    train = replace(config.train, router_replay="none")
    check_routing(train, read_hf_config(config.model.path))
    return replace(config, train=train)


def _open_model(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; ValueError if the directory cannot be what the run needs."""
    path = Path(model.path)
    try:
        hf_config = read_hf_config(path)
    except ValueError as error:
        raise ValueError(f"model.path={model.path}: {error}") from None
    if has_value_head(hf_config):
        raise ValueError(
            f"model.path={model.path}: {hf_config['architectures'][0]} gives values, not log-probs; a critic"
            " starts from it as critic.path"
        )
    if model.init == "hf":
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: no *.safetensors there; model.init=random starts without"
            )
        open_hf_dir(path)
        if carried := sorted(carried_tensors(path, hf_config)):
            print(f"{len(carried)} tensors are not trained, but go into exports unchanged: {carried[0]}, ...")
    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"model.path={model.path}: no tokenizer there ({error})") from None


def _check_critic(config: Config) -> None:
    """ValueError if the critic cannot start from what the recipe names, or not learn with the policy."""
    path = config.critic.path or config.model.path
    try:
        of_critic, of_policy = read_hf_config(path), read_hf_config(config.model.path)
    except ValueError as error:
        raise ValueError(f"critic.path={path}: {error}") from None
    if of_critic["vocab_size"] != of_policy["vocab_size"]:
        raise ValueError(
            f"critic.path={path}: its vocabulary has {of_critic['vocab_size']} tokens, that of"
            f" model.path={config.model.path} {of_policy['vocab_size']}; take one with the same tokenizer"
        )


def _load(config: Config, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    return load_prompts(files, tokenizer, config.data.max_prompt_len, config.data.overlong) if files else []


def _make_scorer(config: Config) -> Scorer:
    questions: dict[str, Question] = {}
    if config.judge.is_used:
        questions["judge"] = JudgeQuestion(config.reward.judge)
    if config.reward_model.is_used:
        questions["reward_model"] = RewardModelQuestion(
            config.reward.model_tokenizer or config.reward_model.path
        )
    return Scorer(config.reward, config.rollout.max_response_len, questions)


def _connect(scorer: Scorer, processes: RunProcesses) -> dict[str, ServedModel]:
    """The models beside the policy, once they are up; those that give rewards are the scorer's."""
    served = processes.served.wait()
    for role, model in served.items():
        _log.info("%s: %s at %s", role, model.model, ", ".join(map(str, model.engines)))
    clients = {role: ServedClient(model) for role, model in served.items()}
    scorer.connect({role: client.post_all for role, client in clients.items()}, processes.watched)
    return served


def _check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    path = config.teacher.path
    try:
        check_same_vocabulary(tokenizer, AutoTokenizer.from_pretrained(path), config.model.path, path)
    except OSError as error:
        raise ValueError(f"teacher.path={path}: no tokenizer there ({error})") from None


def _check_no_trainer(config: Config) -> None:
    if config.rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization={config.rollout.quantization}: trainer ranks quantise, and an evaluation"
            " has none; use rollout.quantization=none"
        )


def _check_lens(config: Config) -> None:
    longest = config.data.max_prompt_len + config.rollout.max_response_len
    if longest > config.train.max_tokens_per_microbatch:
        raise ValueError(
            f"data.max_prompt_len + rollout.max_response_len = {longest} exceeds"
            f" train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch}: raise the latter"
        )


def _make_client(config: Config, engines: EngineGroup, tokenizer: PreTrainedTokenizerBase) -> RolloutClient:
    """Waits for the engines."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ValueError(f"the tokenizer in {config.model.path} has no eos_token: responses would never stop")
    return RolloutClient(
        engines.wait_built(), config.rollout, [stop], decode, experts_shape(config), engines.rotation
    )


def _pack(
    config: Config, trainer: TrainerGroup, folder: RunFolder, temperature: float = 1.0
) -> PackedTrainer:
    return PackedTrainer(
        trainer,
        folder,
        packing=Packing.of(config.parallel, config.train.max_tokens_per_microbatch),
        temperature=temperature,
        checkpoint=config.checkpoint,
    )


def _make_critic(config: Config, ranks: CriticGroup, folder: RunFolder, gpus: SharedGpus) -> Critic:
    packing = Packing.of(config.critic.parallel, config.train.max_tokens_per_microbatch)
    critic = PackedCritic(ranks, folder, packing=packing, checkpoint=config.checkpoint)
    return SharingCritic(critic, gpus) if config.critic.colocated else critic


def _resume(trainer: TrainerGroup, parts: Mapping[str, Any], newest: Any) -> int:
    """The step to continue after: 0 without a checkpoint. `parts`: what else has a state, by its name."""
    if newest is None:
        return 0
    state = trainer.load(str(newest))
    for name, part in parts.items():
        part.load_state_dict(state[name])
    print(f"resumed from {newest}")
    return state["step"]


def _make_log(config: Config, folder: RunFolder, total_steps: int | None, start_step: int) -> MetricsLogger:
    log = config.log
    return MetricsLogger(
        folder.path,
        last_step=start_step or None,
        total_steps=total_steps,
        console=log.console,
        tensorboard=log.tensorboard,
        wandb_project=log.wandb_project,
        mlflow_uri=log.mlflow_uri,
        config=asdict(config),
    )


def _finish(config: Config, trainer: TrainerGroup, folder: RunFolder) -> None:
    """Complete the save under way; export if asked."""
    trainer.finish_save()
    folder.prune(config.checkpoint.keep)
    if config.checkpoint.export_hf:
        _log.info("export")
        trainer.export_hf(str(folder.export))
