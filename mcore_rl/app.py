"""What the commands do: a checked Config in, a run folder out; parts are made here and handed to loops."""

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.algo.build import make_advantages, make_policy_loss, sft_loss
from mcore_rl.canary import Canary
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.group import guard
from mcore_rl.cluster.host import node_address
from mcore_rl.cluster.placement import gpus_per_node, plan_engine, plan_trainer, reserve
from mcore_rl.cluster.session import ray_session
from mcore_rl.cluster.trainer import TrainerGroup, TrainerSpec
from mcore_rl.config import Config, ModelConfig, OptimizerConfig
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.sft import SftStream
from mcore_rl.data.source import ShuffledStream
from mcore_rl.evaluation import evaluate
from mcore_rl.loop import train
from mcore_rl.metrics import MetricsLogger
from mcore_rl.players import EngineGenerator, EngineSync, EventLoop, PackedTrainer
from mcore_rl.recipe import require
from mcore_rl.report import make_report
from mcore_rl.rewards.functions import load_reward, score_samples
from mcore_rl.roles import Reward, Roles
from mcore_rl.rollout.client import EngineAddress, RolloutClient
from mcore_rl.rollout.engine import EngineSpec
from mcore_rl.run_folder import RunFolder
from mcore_rl.sft import fine_tune
from mcore_rl.slices.families import family_of
from mcore_rl.slices.hf_config import read_hf_config
from mcore_rl.slices.hf_files import open_hf_dir
from mcore_rl.stream.engine_control import LOADER
from mcore_rl.stream.refit import Refitter
from mcore_rl.types import Prompt, WeightVersion


def run_train(config: Config) -> None:
    """`mcore-rl train`: everything that can be refused is refused before a process is started."""
    require(config, "run.dir", "model.path", "data.train", "reward.path")
    tokenizer = _open_model(config.model)
    prompts = ShuffledStream(
        _load(config, config.data.train, tokenizer), config.run.seed, config.data.shuffle
    )
    held_out = _load(config, config.eval.data, tokenizer)[: config.eval.max_prompts]
    reward = _make_reward(config)
    loss, advantages = make_policy_loss(config.algorithm), make_advantages(config.algorithm)
    _check_lens(config)
    folder = RunFolder(config.run.dir)
    newest = folder.prepare(config)
    num_steps = config.run.steps * config.train.epochs * config.train.mini_batches
    with _cluster(config, folder, with_engines=True, with_trainer=True) as cluster:
        trainer = cluster.start_trainer(config, config.train.optimizer, num_steps, loss)
        addresses = cluster.start_engines(config)
        trainer.wait_built()
        if config.algorithm.kl.coef:
            trainer.snapshot_reference()
        start_step = _resume(trainer, prompts, newest)
        client = _make_client(config, addresses(), tokenizer)
        refitter = Refitter(
            trainer,
            host=node_address(),
            bucket_mib=config.sync.bucket_mib,
            timeout_s=config.run.call_timeout_s,
            staged=config.rollout.stage_weights,
        )
        packed = _pack(config, trainer, folder)
        canary = Canary(packed, config.canary, config.model.dtype, config.run.call_timeout_s, cluster.watched)
        weights = EngineSync(refitter, client, canary, cluster.watched)
        weights.connect(client.urls)
        weights.sync(WeightVersion(start_step))
        with _make_log(config, folder, config.run.steps, start_step) as log:
            roles = Roles(
                prompts=prompts,
                held_out=held_out,
                generator=EngineGenerator(client, config.rollout, cluster.watched),
                reward=reward,
                advantages=advantages,
                trainer=packed,
                weights=weights,
                log=log,
            )
            train(config, roles, start_step)
        _finish(config, trainer, folder)
    make_report(folder.path)


def run_sft(config: Config) -> None:
    """`mcore-rl sft`: from the weights in model.path, or from random ones, to <run.dir>/hf."""
    require(config, "run.dir", "model.path", "sft.data")
    tokenizer = _open_model(config.model)
    batches = SftStream(config.sft.data, tokenizer, config.sft.max_len, config.run.seed)
    folder = RunFolder(config.run.dir)
    newest = folder.prepare(config)
    with _cluster(config, folder, with_engines=False, with_trainer=True) as cluster:
        trainer = cluster.start_trainer(config, config.sft.optimizer, config.sft.steps, sft_loss)
        trainer.wait_built()
        start_step = _resume(trainer, batches, newest)
        with _make_log(config, folder, config.sft.steps, start_step) as log:
            fine_tune(config, batches, _pack(config, trainer, folder), log, start_step)
        _finish(config, trainer, folder)
    print(folder.export)


def run_eval(config: Config) -> None:
    """`mcore-rl eval`: engines alone, on the weights in model.path; the numbers go to <run.dir>/eval."""
    require(config, "run.dir", "model.path", "eval.data", "reward.path")
    tokenizer = _open_model(config.model)
    held_out = _load(config, config.eval.data, tokenizer)[: config.eval.max_prompts]
    reward = _make_reward(config)
    folder = RunFolder(Path(config.run.dir) / "eval")
    folder.prepare(config)
    with _cluster(config, folder, with_engines=True, with_trainer=False) as cluster:
        client = _make_client(config, cluster.start_engines(config)(), tokenizer)
        generator = EngineGenerator(client, config.rollout, cluster.watched)
        with _make_log(config, folder, None, 0) as log:
            metrics, samples, rewards_N = evaluate(generator, held_out, reward, config.eval, config.run.seed)
            log.log(0, metrics)
            log.log_samples(0, samples, rewards_N, split="eval")
    print(folder.path)


@dataclass
class _Cluster:
    """The processes of a run while they live."""

    trainer: TrainerGroup | None
    engines: EngineGroup | None
    event_loop: EventLoop
    log_dir: str

    def start_trainer(
        self, config: Config, optimizer: OptimizerConfig, num_steps: int, loss: Any
    ) -> TrainerGroup:
        assert self.trainer is not None
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
        self.trainer.start_build(spec, config.run.startup_timeout_s)
        return self.trainer

    def start_engines(self, config: Config) -> Any:
        """Begin; the returned function waits and gives the addresses."""
        assert self.engines is not None
        specs = [
            _engine_spec(config, f"{self.log_dir}/sglang_{i}.log") for i in range(config.rollout.engines)
        ]
        self.engines.start_build(specs, config.run.startup_timeout_s)
        return self.engines.wait_built

    def watched(self, work: Awaitable[Any]) -> Any:
        groups = [group for group in (self.trainer, self.engines) if group is not None]
        return self.event_loop.run(guard(work, *(group.watch() for group in groups)))


@contextmanager
def _cluster(
    config: Config, folder: RunFolder, *, with_engines: bool, with_trainer: bool
) -> Iterator[_Cluster]:
    """Ray, and the processes of the ranks and engines, gone at the end whatever happened."""
    num_ranks = config.parallel.world_size if with_trainer else 0
    num_engines = config.rollout.engines if with_engines else 0
    cpus = config.cluster.cpus_per_rank
    with ray_session(config.cluster, num_cpus=cpus * (num_ranks + num_engines * config.rollout.engine_ranks)):
        gpus = gpus_per_node()
        plans = [plan_trainer(num_ranks, cpus, gpus)] if with_trainer else []
        plans += [plan_engine(config.rollout.engine_ranks, cpus, gpus) for _ in range(num_engines)]
        slots = reserve(plans, config.run.startup_timeout_s)
        trainer_slots, engine_slots = (slots[0], slots[1:]) if with_trainer else ([], slots)
        timeout_s = config.run.call_timeout_s
        trainer = TrainerGroup(trainer_slots, folder.logs, timeout_s) if with_trainer else None
        engines = EngineGroup(engine_slots, folder.logs, timeout_s) if with_engines else None
        event_loop = EventLoop()
        try:
            yield _Cluster(trainer, engines, event_loop, str(folder.logs))
        finally:
            event_loop.close()


def _engine_spec(config: Config, log_path: str) -> EngineSpec:
    rollout = config.rollout
    dummy = ("--load-format", "dummy") if config.model.init == "random" else ()
    return EngineSpec(
        model_path=config.model.path,
        log_path=log_path,
        dtype=config.model.dtype,
        tp=rollout.tp,
        ep=rollout.ep,
        pp=rollout.pp,
        attention_dp=rollout.attention_dp,
        kv_cache_len=rollout.kv_cache_len,
        max_running=rollout.max_concurrency,
        deterministic=rollout.deterministic,
        routed_experts=_experts_shape(config) is not None,
        custom_weight_loaders=(LOADER,),
        seed=config.run.seed,
        extra_args=("--weight-version", "0", *dummy),
    )


def _open_model(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; ValueError if the directory cannot be what the run needs."""
    path = Path(model.path)
    try:
        read_hf_config(path)
    except ValueError as error:
        raise ValueError(f"model.path={model.path}: {error}") from None
    if model.init == "hf":
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: no *.safetensors there; model.init=random starts without"
            )
        open_hf_dir(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"model.path={model.path}: no tokenizer there ({error})") from None


def _load(config: Config, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    return load_prompts(files, tokenizer, config.data.max_prompt_len, config.data.overlong) if files else []


def _make_reward(config: Config) -> Reward:
    return partial(score_samples, load_reward(config.reward.path, config.reward.name))


def _check_lens(config: Config) -> None:
    longest = config.data.max_prompt_len + config.rollout.max_response_len
    if longest > config.train.max_tokens_per_microbatch:
        raise ValueError(
            f"data.max_prompt_len + rollout.max_response_len = {longest} exceeds"
            f" train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch}: raise the latter"
        )


def _make_client(
    config: Config, addresses: Sequence[EngineAddress], tokenizer: PreTrainedTokenizerBase
) -> RolloutClient:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ValueError(f"the tokenizer in {config.model.path} has no eos_token: responses would never stop")
    return RolloutClient(addresses, config.rollout, [stop], decode, _experts_shape(config))


def _experts_shape(config: Config) -> tuple[int, int] | None:
    """Layers and experts per token, if the model has experts and the recipe wants to hear of them."""
    hf_config = read_hf_config(Path(config.model.path))
    if not config.drift.routed_experts or not family_of(hf_config).sizes(hf_config).get("experts"):
        return None
    return hf_config["num_hidden_layers"], hf_config["num_experts_per_tok"]


def _pack(config: Config, trainer: TrainerGroup, folder: RunFolder) -> PackedTrainer:
    return PackedTrainer(
        trainer,
        folder,
        dp_size=config.parallel.dp_size,
        multiple_of=config.parallel.pp if config.parallel.vpp else 1,
        max_tokens=config.train.max_tokens_per_microbatch,
        temperature=config.rollout.temperature,
        checkpoint=config.checkpoint,
    )


def _resume(trainer: TrainerGroup, stream: Any, newest: Any) -> int:
    """The step to continue after: 0 without a checkpoint."""
    if newest is None:
        return 0
    state = trainer.load(str(newest))
    stream.load_state_dict(state["prompts"])
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
        trainer.export_hf(str(folder.export))
