"""Refuses options that contradict those of another group, or that nothing reads in their context.

Errors name the options, their values and a remedy. An option counts as set if it differs from its
default. Only what is surely unread is listed. What depends on the chosen advantage or loss is
refused by checks/algorithm.py, what depends on the model's sizes by checks/sizes.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from mcore_rl.config.agents import AgentsConfig
from mcore_rl.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import (
    DriftConfig,
    ParityCheckConfig,
    RolloutConfig,
    ServedModelConfig,
    SyncConfig,
)
from mcore_rl.config.run import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    ProfileConfig,
    RecoveryConfig,
    RewardConfig,
    RunConfig,
)
from mcore_rl.config.servers import SandboxConfig, SearchConfig
from mcore_rl.config.training import (
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.config.tree import defaults_of, spell, value_of


def check_quantization(rollout: RolloutConfig, model: ModelConfig, train: TrainConfig) -> None:
    """Raise ValueError if engines cannot hold quantized weights as the recipe says."""
    chosen = f"rollout.quantization={rollout.quantization}"
    if rollout.quantization != "none" and model.dtype != "bfloat16":
        raise ValueError(f"{chosen} with model.dtype={model.dtype}: needs model.dtype=bfloat16")
    if rollout.quantization != "int4":
        return
    if train.lora.rank:
        raise ValueError(
            f"{chosen} with train.lora.rank={train.lora.rank}: engines merge factors into no"
            " weights in INT4; set rollout.quantization=none, or train.lora.rank=0"
        )
    for name, value, needed in (
        ("moe_runner_backend", rollout.sglang.get("moe_runner_backend"), "triton"),
        ("moe_a2a_backend", rollout.sglang.get("moe_a2a_backend"), "none"),
    ):
        if value not in (None, needed):
            raise ValueError(
                f"{chosen} with rollout.sglang.{name}={value}: SGLang's kernel for experts in INT4"
                f" whose weights can be synced is that of its Triton runner; set it to {needed}, or"
                " rollout.quantization=none"
            )


def check_fake_quantization(train: TrainConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if weights cannot be rounded in training as the recipe says."""
    chosen = f"train.fake_quantization={train.fake_quantization}"
    if train.fake_quantization == "none":
        return
    if rollout.quantization not in ("none", train.fake_quantization):
        raise ValueError(
            f"{chosen} with rollout.quantization={rollout.quantization}: engines would compute with"
            f" other weights than training; set train.fake_quantization={rollout.quantization}, or"
            " rollout.quantization=none for engines that get the rounded weights in model.dtype"
        )
    if train.lora.rank:
        raise ValueError(
            f"{chosen} with train.lora.rank={train.lora.rank}: engines merge factors into weights"
            " that are not rounded; set train.fake_quantization=none, or train.lora.rank=0"
        )


def check_agents(agents: AgentsConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError if episodes cannot run as the recipe says."""
    if agents.max_turn_len > rollout.max_response_len:
        raise ValueError(
            f"agents.max_turn_len={agents.max_turn_len} exceeds rollout.max_response_len="
            f"{rollout.max_response_len}, which bounds all turns together: raise the latter"
        )


def check_steps(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, train: TrainConfig, critic: CriticConfig
) -> None:
    """Raise ValueError if the samples of a step cannot be trained on as the recipe says."""
    if rollout.stale == "correct" and not algorithm.correction.is_on:
        raise ValueError(
            "rollout.stale=correct with algorithm.correction.weight=none and bypass=false: none"
            " corrects; set algorithm.correction.weight=token, or rollout.stale=wait"
        )
    if rollout.mode != "sync" and not algorithm.correction.is_chosen:
        raise ValueError(
            f"rollout.mode={rollout.mode} without algorithm.correction.weight: older weights draw"
            " the samples, and the ratio of the policy loss does not correct for that, as it"
            " compares with the policy at the start of the training step; with one optimizer step"
            f" (train.mini_batches * train.epochs = {train.mini_batches * train.epochs} here) it is"
            " 1 however stale the samples are. Choose algorithm.correction.weight=token, sequence"
            " or geometric, algorithm.correction.bypass=true, or weight=none for no correction"
        )
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    for name, mini_batches in (("train", train.mini_batches), ("critic", critic.mini_batches)):
        if num_samples % mini_batches:
            raise ValueError(
                f"rollout.prompts_per_step * rollout.samples_per_prompt = {num_samples} is not"
                f" divisible by {name}.mini_batches={mini_batches}"
            )


def check_epochs(run: RunConfig, data: DataConfig) -> None:
    """Raise ValueError if passes are to be counted over data sets of which each has its own."""
    if run.epochs is not None and data.sources:
        raise ValueError(
            f"run.epochs={run.epochs:g} with {len(data.sources)} data.sources: each is passed over"
            " at a speed of its own; set run.steps, or name the files in data.train"
        )


def check_best(checkpoint: CheckpointConfig, evaluation: EvalConfig) -> None:
    """Raise ValueError if checkpoints are compared by a number that they do not have."""
    metric = checkpoint.best_metric
    if not checkpoint.keep_best or not metric.startswith("eval/"):
        return
    every, saves = evaluation.every_steps, checkpoint.every_steps
    if not every or not saves or saves % every:
        raise ValueError(
            f"checkpoint.keep_best={checkpoint.keep_best} compares by {metric}, which each"
            f" checkpoint needs: checkpoint.every_steps={saves} must be a multiple of"
            f" eval.every_steps={every}; set both, such as to {every or saves or 20}"
        )


def check_overlong(reward: RewardConfig, rollout: RolloutConfig) -> None:
    if reward.overlong_buffer_len > rollout.max_response_len:
        raise ValueError(
            f"reward.overlong_buffer_len={reward.overlong_buffer_len} exceeds"
            f" rollout.max_response_len={rollout.max_response_len}: even an empty response would be"
            " punished for its length; lower the former"
        )


def check_colocated_models(
    served: Mapping[str, ServedModelConfig], parallel: ParallelConfig, rollout: RolloutConfig
) -> None:
    """Raise ValueError if a model cannot be served on the trainer ranks' GPUs."""
    for role, model in served.items():
        needed = model.engines * model.engine_ranks
        if model.is_colocated and needed > parallel.world_size:
            raise ValueError(
                f"{role}.colocated=true with {role}.engines * {role}.tp * {role}.pp = {needed}:"
                f" there are parallel.world_size={parallel.world_size} trainer ranks to share a GPU"
                " with"
            )
        if model.is_colocated and rollout.mode != "sync":
            raise ValueError(
                f"{role}.colocated=true with rollout.mode={rollout.mode}: samples are scored while"
                f" the trainer uses the GPUs; set rollout.mode=sync, or {role}.colocated=false"
            )


def fill_gpus(gpus: int, parallel: ParallelConfig, others: Mapping[str, int]) -> ParallelConfig:
    """Return `parallel` with the largest dp whose ranks fit into `gpus` beside the others.

    others   GPUs of the rest of the run, by the options that set them

    Raises ValueError naming all of these sizes if no dp fits.
    """
    left = gpus - sum(others.values())
    replica = parallel.tp * parallel.pp * parallel.cp
    for dp in range(left // replica, 0, -1):
        if parallel.tp * parallel.cp * dp % (parallel.ep * parallel.etp) == 0:
            return replace(parallel, dp=dp)
    beside = "".join(f", beside {number} by {option}" for option, number in others.items())
    raise ValueError(
        f"cluster.gpus={gpus} leaves {max(left, 0)} for the trainer{beside}, and its ranks are"
        f" multiples of {parallel.world_size} (parallel.tp={parallel.tp}, pp={parallel.pp},"
        f" cp={parallel.cp}, ep={parallel.ep}, etp={parallel.etp}): lower one of these, or raise"
        " cluster.gpus"
    )


def check_replay(train: TrainConfig, drift: DriftConfig) -> None:
    if train.router_replay == "engine" and not drift.routed_experts:
        raise ValueError(
            "train.router_replay=engine with drift.routed_experts=False: engines are not asked for"
            " their experts; set drift.routed_experts=true"
        )
    if train.indexer_replay == "engine" and not drift.indexer_topk:
        raise ValueError(
            "train.indexer_replay=engine with drift.indexer_topk=False: engines are not asked for"
            " the keys that they attend to; set drift.indexer_topk=true"
        )


def check_colocated(parallel: ParallelConfig, rollout: RolloutConfig) -> None:
    needed = rollout.engines * rollout.engine_ranks
    if needed > parallel.world_size:
        raise ValueError(
            f"cluster.colocated=true with rollout.engines * rollout.tp * rollout.pp = {needed}:"
            f" there are parallel.world_size={parallel.world_size} trainer ranks to share a GPU"
            " with"
        )
    for name, needs, why in (
        ("mode", "sync", "an engine cannot generate while its GPUs train"),
        ("stage_weights", False, "there is no memory for the weights twice"),
        ("restarts", 0, "a server that starts would take the memory that training uses"),
    ):
        if getattr(rollout, name) != needs:
            raise ValueError(
                f"cluster.colocated=true with rollout.{name}={getattr(rollout, name)}: {why};"
                f" set rollout.{name}={str(needs).lower()}"
            )


@dataclass(frozen=True)
class Unread:
    """Options (or groups, with all their options) that nothing reads because of `context`."""

    options: tuple[str, ...]
    context: str
    remedy: str


def refuse(config: object, unread_options: Iterable[Unread]) -> None:
    """Raise ValueError naming the first of `unread_options` that differs from its default."""
    for unread in unread_options:
        for option in unread.options:
            for name, default in defaults_of(type(config), option):
                value = value_of(config, name)
                if value != default:
                    raise ValueError(
                        f"{name}={spell(value)} with {unread.context}, which has no use for it:"
                        f" {unread.remedy}, or leave {name} out (by default it is {spell(default)})"
                    )


def find_unread_in_rollout(rollout: RolloutConfig) -> Iterator[Unread]:
    mode = f"rollout.mode={rollout.mode}"
    if rollout.mode != "async":
        options = ("rollout.max_staleness", "rollout.stale", "rollout.partial")
        yield Unread(options, mode, "choose another rollout.mode")
    if rollout.mode == "sync":
        yield Unread(("rollout.max_in_flight",), mode, "choose another rollout.mode")
    else:
        yield Unread(("rollout.oversampling",), mode, "choose another rollout.mode")
    if rollout.engines == 1:
        remedy = "set rollout.engines above 1"
        yield Unread(("rollout.migration_gap",), "rollout.engines=1", remedy)
    if not rollout.store_gib:
        remedy = "set rollout.store_gib above 0"
        yield Unread(("rollout.spill_dir",), "rollout.store_gib=0", remedy)
    if not rollout.dynamic_sampling:
        options = ("rollout.oversampling", "rollout.max_rounds")
        remedy = "set rollout.dynamic_sampling=true"
        yield Unread(options, "rollout.dynamic_sampling=false", remedy)


def find_unread_in_kl(kl: KLConfig) -> Iterator[Unread]:
    remedy = "set algorithm.kl.coef above 0"
    if kl.coef == 0:
        options = ("algorithm.kl.in_reward", "algorithm.kl.horizon")
        yield Unread(options, "algorithm.kl.coef=0", remedy)
    if kl.target == 0:
        remedy = "set algorithm.kl.target above 0"
        yield Unread(("algorithm.kl.horizon",), "algorithm.kl.target=0", remedy)


def find_unread_in_correction(correction: CorrectionConfig) -> Iterator[Unread]:
    if not correction.is_weighted:
        names = ("low", "high", "bound", "normalize")
        options = tuple(f"algorithm.correction.{name}" for name in names)
        context = f"algorithm.correction.weight={spell(correction.weight)}"
        yield Unread(options, context, "set algorithm.correction.weight=token")
    if correction.bound == "truncate":
        remedy = "set algorithm.correction.bound=mask"
        yield Unread(("algorithm.correction.low",), "algorithm.correction.bound=truncate", remedy)
    if correction.reject == "none":
        remedy = "set algorithm.correction.reject=token or sequence"
        names = ("reject_above", "reject_below", "reject_estimator")
        options = tuple(f"algorithm.correction.{name}" for name in names)
        yield Unread(options, "algorithm.correction.reject=none", remedy)
    elif correction.reject_estimator != "k1":
        context = f"algorithm.correction.reject_estimator={correction.reject_estimator}"
        remedy = "set algorithm.correction.reject_estimator=k1"
        yield Unread(("algorithm.correction.reject_below",), context, remedy)


def find_unread_in_reward(reward: RewardConfig, has_environment: bool) -> Iterator[Unread]:
    if reward.overlong_buffer_len == 0:
        remedy = "set reward.overlong_buffer_len"
        yield Unread(("reward.overlong_penalty",), "reward.overlong_buffer_len=0", remedy)
    if reward.on_error != "value":
        context = f"reward.on_error={reward.on_error}"
        yield Unread(("reward.error_value",), context, "set reward.on_error=value")
    if reward.on_error == "stop" and not has_environment:
        remedy = "set reward.on_error=leave_out"
        yield Unread(("reward.max_failed_share",), "reward.on_error=stop", remedy)
    if not reward.path:
        options = ("reward.name", "reward.kwargs")
        yield Unread(options, "reward.path=''", "set reward.path")


def find_unread_in_served(role: str, model: ServedModelConfig) -> Iterator[Unread]:
    if not model.is_used:
        context = f"{role}.path='' and {role}.url=''"
        yield Unread((role,), context, f"set {role}.path or {role}.url")
    elif model.url:
        names = (
            *("engines", "tp", "ep", "pp", "dtype", "kv_cache_len"),
            *("startup_timeout_s", "restarts", "sglang"),
        )
        options = tuple(f"{role}.{name}" for name in names)
        yield Unread(options, f"{role}.url={model.url}", f"set {role}.path instead")


def find_unread_in_optimizer(group: str, optimizer: OptimizerConfig) -> Iterator[Unread]:
    if optimizer.schedule == "constant":
        remedy = f"set {group}.schedule=linear or cosine"
        yield Unread((f"{group}.min_lr",), f"{group}.schedule=constant", remedy)


def find_unread_in_episodes(agents: AgentsConfig, evaluation: EvalConfig) -> Iterator[Unread]:
    if not evaluation.num_samples:
        options = ("eval.temperature", "eval.top_p")
        yield Unread(options, "eval.samples=0 and eval.pass_k=1", "set eval.samples=4")
    if agents.is_used:
        context = f"agents.environment={agents.environment}"
        remedy = "rollout.max_response_len bounds episodes of evaluations, too: set it"
        yield Unread(("eval.max_response_len",), context, remedy)
    else:
        yield Unread(("agents",), "agents.environment=''", "set agents.environment")


def find_unread_in_servers(sandbox: SandboxConfig, search: SearchConfig) -> Iterator[Unread]:
    if not sandbox.is_used:
        yield Unread(("sandbox",), "sandbox.workers=0", "set sandbox.workers above 0")
    if not search.is_used:
        yield Unread(("search",), "search.index=''", "set search.index")


def find_unread_without_models(judge_is_used: bool, reward_model_is_used: bool) -> Iterator[Unread]:
    if not judge_is_used:
        context = "judge.path='' and judge.url=''"
        yield Unread(("reward.judge",), context, "set judge.path or judge.url")
    if not reward_model_is_used:
        context = "reward_model.path='' and reward_model.url=''"
        remedy = "set reward_model.path or reward_model.url"
        yield Unread(("reward.model_tokenizer",), context, remedy)


def find_unread_in_cluster(cluster: ClusterConfig) -> Iterator[Unread]:
    if cluster.address is not None:
        context = f"cluster.address={cluster.address}"
        remedy = "give it to `ray start --object-store-memory`"
        yield Unread(("cluster.object_store_mib",), context, remedy)
        remedy = "give `ray start --head` --include-dashboard=true"
        yield Unread(("cluster.dashboard",), context, remedy)
    else:
        options = ("cluster.num_nodes", "cluster.separate_nodes")
        yield Unread(
            options, "cluster.address=null", "submit the run, or join a Ray by its address"
        )


def check_recovery(recovery: RecoveryConfig, layouts: Mapping[str, ParallelConfig]) -> None:
    """Raise ValueError if run.recovery.min_dp leaves a model no smaller layout.

    layouts   of the models, by their groups of options
    """
    if recovery.min_dp is None:
        return
    for group, parallel in layouts.items():
        if recovery.min_dp >= parallel.dp_size:
            raise ValueError(
                f"run.recovery.min_dp={recovery.min_dp} is no smaller data-parallel size than"
                f" {group}.dp={parallel.dp_size}; lower it, or leave it out"
            )
        parallel.shrink(parallel.dp_size - 1, recovery.min_dp, group)


def find_unread_in_recovery(recovery: RecoveryConfig) -> Iterator[Unread]:
    if not recovery.is_used:
        context = f"run.recovery.partner={recovery.partner}, restarts={recovery.restarts}"
        yield Unread(("run.recovery.min_dp",), context, "set run.recovery.partner=memory")


def find_unread_in_profile(profile: ProfileConfig) -> Iterator[Unread]:
    if not profile.steps:
        options = ("profile.ranks", "profile.tool")
        yield Unread(options, "profile.steps=[]", "set profile.steps=[3]")


def find_unread_in_sync(parity_check: ParityCheckConfig, sync: SyncConfig) -> Iterator[Unread]:
    if parity_check.sequences == 0:
        options = ("parity_check.tolerance", "parity_check.factor")
        yield Unread(options, "parity_check.sequences=0", "set parity_check.sequences=2")
    if parity_check.tolerance is not None:
        context = f"parity_check.tolerance={parity_check.tolerance:g}"
        yield Unread(("parity_check.factor",), context, "set parity_check.tolerance=null")
    if sync.verify != "destination":
        context = f"sync.verify={sync.verify}"
        yield Unread(("sync.verify_every",), context, "set sync.verify=destination")
