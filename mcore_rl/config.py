"""The typed tree behind every recipe; a YAML key or value that does not fit it is refused by name.

Every leaf has a reader in the package. Units are in the names: _s seconds, _len tokens, _mib 2**20 bytes.
"""

from dataclasses import dataclass, field


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name}={value}: must be greater than 0")


@dataclass
class RunConfig:
    dir: str = ""
    """Folder of everything the run writes: logs, metrics, checkpoints, export, summary."""
    seed: int = 0
    steps: int = 100
    resume: bool = True
    """Continue from the newest complete checkpoint in `dir`, if there is one."""
    call_timeout_s: float = 600.0
    """Deadline of any one call to the ranks or engines (a step, a save, a weight sync)."""
    startup_timeout_s: float = 240.0

    def __post_init__(self) -> None:
        _positive("run.steps", self.steps)
        _positive("run.call_timeout_s", self.call_timeout_s)
        _positive("run.startup_timeout_s", self.startup_timeout_s)


@dataclass
class ModelConfig:
    path: str = ""
    """HuggingFace directory: config.json, tokenizer, and safetensors unless init=random."""
    init: str = "hf"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _one_of("model.init", self.init, ("hf", "random"))
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass
class ParallelConfig:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where they are not as many as in those between."""
    last_stage_layers: int | None = None
    """Likewise of the last."""
    dp: int | None = None
    """Data-parallel size; None takes the smallest that fits the experts: ep * etp divides tp * cp * dp."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "etp"):
            _positive(f"parallel.{name}", getattr(self, name))
        for name in ("first_stage_layers", "last_stage_layers"):
            if (layers := getattr(self, name)) is not None and (self.pp == 1 or layers < 1):
                raise ValueError(
                    f"parallel.{name}={layers} with parallel.pp={self.pp}: needs pp > 1 and layers"
                )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ValueError(f"parallel.vpp={self.vpp} with parallel.pp={self.pp}: both must be at least 2")
        if self.tp * self.cp * self.dp_size % (self.ep * self.etp):
            raise ValueError(
                f"parallel.ep * parallel.etp = {self.ep * self.etp} does not divide"
                f" tp * cp * dp = {self.tp * self.cp * self.dp_size}; change parallel.ep or parallel.dp"
            )

    @property
    def dp_size(self) -> int:
        """Data-parallel size of the dense layers."""
        if self.dp is not None:
            return self.dp
        dense, expert = self.tp * self.cp, self.ep * self.etp
        return next(n for n in range(1, expert + 1) if dense * n % expert == 0)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp_size


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        _one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        _positive("optimizer.lr", self.lr)


@dataclass
class TrainConfig:
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_microbatch: int = 4096
    mini_batches: int = 1
    """Optimizer steps per pass over a rollout."""
    epochs: int = 1
    """Passes over a rollout."""
    recompute: str = "none"
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        _one_of("train.recompute", self.recompute, ("none", "selective", "full"))
        for name in ("max_tokens_per_microbatch", "mini_batches", "epochs"):
            _positive(f"train.{name}", getattr(self, name))


@dataclass
class DataConfig:
    train: list[str] = field(default_factory=list)
    """Prompt files, parquet (verl columns) or jsonl with the same keys."""
    max_prompt_len: int = 512
    overlong: str = "filter"
    shuffle: bool = True

    def __post_init__(self) -> None:
        _one_of("data.overlong", self.overlong, ("filter", "error"))


@dataclass
class RolloutConfig:
    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    attention_dp: int = 1
    """Groups of an engine's tensor-parallel ranks that each hold all attention weights (DP attention)."""
    quantization: str = "none"
    """fp8: engines serve projections in 128 x 128 blocks of FP8, which trainer ranks compute as they send."""
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    max_response_len: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_concurrency: int = 256
    """Requests in flight per engine."""
    kv_cache_len: int = 65536
    """Tokens of KV cache per engine."""
    request_timeout_s: float = 300.0
    retries: int = 3
    stage_weights: bool = True
    """Receive weights beside the decoding, pause only to swap them in; takes memory for the weights twice."""
    restarts: int = 1
    """How often the server of each engine is started again in a run; 0: a dead one ends the run."""
    deterministic: bool = False
    """Sampling seeded per request: the same run samples the same tokens again."""

    def __post_init__(self) -> None:
        sizes = ("engines", "tp", "ep", "pp", "attention_dp")
        for name in (*sizes, "prompts_per_step", "samples_per_prompt", "max_response_len"):
            _positive(f"rollout.{name}", getattr(self, name))
        _positive("rollout.temperature", self.temperature)
        _one_of("rollout.quantization", self.quantization, ("none", "fp8"))
        for name in ("ep", "attention_dp"):
            if self.tp % getattr(self, name):
                raise ValueError(f"rollout.{name}={getattr(self, name)} does not divide rollout.tp={self.tp}")

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp


@dataclass
class KLConfig:
    coef: float = 0.0
    estimator: str = "k3"

    def __post_init__(self) -> None:
        _one_of("algorithm.kl.estimator", self.estimator, ("k1", "k2", "k3"))


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    kl: KLConfig = field(default_factory=KLConfig)


@dataclass
class DriftConfig:
    """How far the trainer's log-probs of sampled tokens may be from the engine's, and why they are."""

    routed_experts: bool = True
    """Ask engines which experts each token went to; count the tokens that the trainer routes otherwise."""
    warn_above: float = 0.0
    """Mean |difference| in nats beyond which a step warns; 0 never does."""
    stop_above: float = 0.0
    """Mean |difference| in nats beyond which the run stops, after the step is logged; 0 never does."""


@dataclass
class CanaryConfig:
    """After each weight sync, engines and trainer score the same few sequences."""

    sequences: int = 2
    """How many, out of the step's own samples; 0 checks nothing."""
    tolerance: float | None = None
    """Mean |difference| in nats beyond which an engine is taken out of rotation; None goes by model.dtype."""


@dataclass
class RewardConfig:
    path: str = ""
    """Python file; a relative path is looked up from the working directory, then beside the recipes."""
    name: str = "reward"


@dataclass
class EvalConfig:
    data: list[str] = field(default_factory=list)
    every_steps: int = 0
    """0 evaluates only before the first and after the last step."""
    max_prompts: int = 256
    pass_k: int = 1
    """Besides greedy accuracy, report pass@k from k samples at the rollout temperature; 1 leaves it out."""


@dataclass
class CheckpointConfig:
    every_steps: int = 0
    """0 saves only after the last step."""
    keep: int = 2
    asynchronous: bool = True
    export_hf: bool = True
    """Write the final policy to <run.dir>/hf."""


@dataclass
class LogConfig:
    console: bool = True
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_uri: str | None = None


@dataclass
class ClusterConfig:
    address: str | None = None
    """Ray address to join; None starts Ray on this machine for the length of the run."""
    cpus_per_rank: float = 1.0
    object_store_mib: int = 512


@dataclass
class SyncConfig:
    bucket_mib: float = 4.0
    """Size of the buffers that weights travel in; each end of a link has four of them."""
    relay: bool = True
    """Engines with equal layouts pass weights on to one another; else trainer ranks send to each of them."""

    def __post_init__(self) -> None:
        _positive("sync.bucket_mib", self.bucket_mib)


@dataclass
class PlanConfig:
    """What `mcore-rl plan` assumes of the cluster."""

    link_gbps: float = 400.0
    """Speed of each rank's network link, 10**9 bits per second, in each direction."""
    ranks_per_host: int = 8
    colocated: bool = False
    """Engines run on the trainer's hosts, rank by rank; else on hosts of their own."""

    def __post_init__(self) -> None:
        _positive("plan.link_gbps", self.link_gbps)
        _positive("plan.ranks_per_host", self.ranks_per_host)


@dataclass
class SftConfig:
    data: list[str] = field(default_factory=list)
    """Parquet or jsonl with a `messages` list that ends in the assistant's answer."""
    steps: int = 100
    batch_size: int = 64
    max_len: int = 1024
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    def __post_init__(self) -> None:
        if self.rollout.quantization == "fp8" and self.model.dtype != "bfloat16":
            raise ValueError(
                f"rollout.quantization=fp8 with model.dtype={self.model.dtype}: needs model.dtype=bfloat16"
            )
        num_samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if num_samples % self.train.mini_batches:
            raise ValueError(
                f"rollout.prompts_per_step * rollout.samples_per_prompt = {num_samples} is not divisible by"
                f" train.mini_batches={self.train.mini_batches}"
            )
