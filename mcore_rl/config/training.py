"""Options of what Megatron trains: the model, its layout, the optimizer."""

from dataclasses import dataclass, field

from mcore_rl.config.checks import one_of, positive


@dataclass
class ModelConfig:
    path: str = ""
    """HuggingFace directory: config.json, tokenizer, and safetensors unless init=random."""
    init: str = "hf"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        one_of("model.init", self.init, ("hf", "random"))
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))


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
            positive(f"parallel.{name}", getattr(self, name))
        for name in ("first_stage_layers", "last_stage_layers"):
            if (layers := getattr(self, name)) is not None and (self.pp == 1 or layers < 1):
                raise ValueError(
                    f"parallel.{name}={layers} with parallel.pp={self.pp}: needs pp > 1 and layers"
                )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ValueError(
                f"parallel.vpp={self.vpp} with parallel.pp={self.pp}: both must be at least 2"
            )
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
        one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        positive("optimizer.lr", self.lr)


@dataclass
class TrainConfig:
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_microbatch: int = 4096
    mini_batches: int = 1
    """Optimizer steps per pass over a rollout."""
    epochs: int = 1
    """Passes over a rollout."""
    recompute: str = "none"
    router_replay: str = "none"
    """Experts that train steps send tokens to: those of the pass for the old log-probs (old_pass), or those
    of the engine that sampled (engine, then also in that pass); none: the router's own choice."""
    router_aux_loss_coef: float = 0.0
    """Of a loss that evens the load of the experts in each micro-batch."""
    router_sequence_aux_loss_coef: float = 0.0
    """Of a loss that evens it in each sequence."""
    router_bias_rate: float = 0.0
    """By how much each optimizer step moves the experts' bias towards an even load, in models with one."""
    freeze_router: bool = False
    """Train all weights but those of the routers, which stay bit for bit as they were loaded."""

    def __post_init__(self) -> None:
        one_of("train.recompute", self.recompute, ("none", "selective", "full"))
        one_of("train.router_replay", self.router_replay, ("none", "old_pass", "engine"))
        for name in ("max_tokens_per_microbatch", "mini_batches", "epochs"):
            positive(f"train.{name}", getattr(self, name))
        for name in ("router_aux_loss_coef", "router_sequence_aux_loss_coef", "router_bias_rate"):
            value = getattr(self, name)
            if value < 0 or (value and self.freeze_router):
                why = (
                    "a frozen router learns no balance"
                    if self.freeze_router
                    else "must not be negative"
                )
                raise ValueError(f"train.{name}={value}: {why}; set train.{name}=0")


@dataclass
class CriticConfig:
    """The critic that algorithm.advantage=gae needs."""

    path: str = ""
    """HuggingFace directory to start from: a policy, or a reward model of one label; empty: model.path."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    mini_batches: int = 1
    """Optimizer steps per pass over a rollout."""
    epochs: int = 1
    """Passes over a rollout."""
    warmup_steps: int = 0
    """Loop steps at first in which only the critic learns."""
    gae_lambda: float = 1.0
    """Of the returns that the critic learns; 1 are the discounted rewards themselves."""
    value_clip: float = 0.2
    """How far a value may move from the one before the step and still earn less loss; 0: any distance."""
    colocated: bool = False
    """Run on the trainer ranks' GPUs, rank by rank, in turn with them; else on GPUs of its own."""

    def __post_init__(self) -> None:
        for name in ("mini_batches", "epochs"):
            positive(f"critic.{name}", getattr(self, name))
        for name in ("warmup_steps", "value_clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"critic.{name}={getattr(self, name)}: must be at least 0")
        if not 0 <= self.gae_lambda <= 1:
            raise ValueError(f"critic.gae_lambda={self.gae_lambda}: must lie in [0, 1]")


@dataclass
class SftConfig:
    data: list[str] = field(default_factory=list)
    """Parquet or jsonl with a `messages` list that ends in the assistant's answer."""
    steps: int = 100
    batch_size: int = 64
    max_len: int = 1024
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class DpoConfig:
    data: list[str] = field(default_factory=list)
    """Parquet or jsonl with `prompt`, `chosen` and `rejected`, as text or as messages."""
    held_out: list[str] = field(default_factory=list)
    """Likewise; every eval.every_steps the share of these pairs is logged that the policy gets right."""
    steps: int = 100
    batch_size: int = 64
    """Pairs of an optimizer step."""
    max_len: int = 1024
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    prompts: int = 0
    """`mcore-rl pairs`: how many of data.train are sampled; 0: all."""
    pairs_per_prompt: int = 1
    """`mcore-rl pairs`: at most."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_len", "pairs_per_prompt"):
            positive(f"dpo.{name}", getattr(self, name))
