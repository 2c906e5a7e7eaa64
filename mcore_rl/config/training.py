"""Options of what Megatron trains: the model, its layout, the optimizer."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mcore_rl.config.bounds import Options, bounded

ExpertGemm = Literal["separate", "grouped_mm"]
SELECTED = "layernorm+moe_act"
"""The modules of train.recompute=selective."""
WHOLE_LAYERS = frozenset({"full"})
"""The modules of train.recompute=full."""
RECOMPUTABLE = frozenset(
    {"layernorm", "moe_act", "moe", "shared_experts", "mlp", "mla_up_proj", "core_attn"}
)


@dataclass
class ModelConfig(Options, group="model"):
    path: str = ""
    """HuggingFace directory: config.json, tokenizer, and safetensors unless init=random. Or an
    id on the Hugging Face hub ("Qwen/Qwen3-30B-A3B"), if there is no such directory."""
    revision: str | None = None
    """Branch, tag or commit of a hub id in `path`; None: its main branch."""
    init: Literal["hf", "random"] = "hf"
    """hf: weights of the directory; random: new ones by its config.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision that ranks and engines compute in."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a tokenizer (auto_map in tokenizer_config.json) and with
    the configuration beside it, in this process, the collectors and the engines."""


@dataclass
class ParallelConfig(Options):
    tp: int = bounded(1, ge=1)
    """Tensor-parallel size of attention and dense layers."""
    pp: int = bounded(1, ge=1)
    """Pipeline stages."""
    vpp: int | None = bounded(None, ge=2)
    """Model chunks of each pipeline stage (interleaved schedule); None: one."""
    cp: int = bounded(1, ge=1)
    """Context-parallel size: ranks that share the tokens of a sequence."""
    ep: int = bounded(1, ge=1)
    """Expert-parallel size: ranks that experts are dealt out to."""
    etp: int = bounded(1, ge=1)
    """Tensor-parallel size of an expert."""
    stage_layers: list[int] = field(default_factory=list)
    """Layers of each pipeline stage, in order; with vpp, of each model chunk, in the order of the
    model. Empty: all have equally many."""
    dp: int | None = bounded(None, ge=1)
    """Data-parallel size; None: the smallest one for which ep * etp divides tp * cp * dp."""

    def check(self, group: str) -> None:
        """Raise ValueError if sizes contradict one another; `group` names them
        ("critic.parallel").
        """
        for name in ("vpp", "stage_layers"):
            value = getattr(self, name)
            if value and self.pp == 1:
                raise ValueError(
                    f"{group}.{name}={value} with {group}.pp=1: there is only one pipeline stage;"
                    f" leave {group}.{name} out, or raise {group}.pp"
                )
        self._check_stages(group)
        num_ranks = self.tp * self.cp * self.dp_size
        if num_ranks % (self.ep * self.etp):
            raise ValueError(
                f"{group}.ep * {group}.etp = {self.ep * self.etp} does not divide"
                f" tp * cp * dp = {num_ranks}; change {group}.ep or {group}.dp"
            )

    def shrink(self, most: int, least: int, group: str) -> "ParallelConfig":
        """Return the layout of the largest legal data-parallel size from `most` down to `least`.

        Raises ValueError, by the names in `group`, if none is legal.
        """
        reason = ""
        for dp in range(most, least - 1, -1):
            smaller = replace(self, dp=dp)
            try:
                smaller.check(group)
            except ValueError as error:
                reason = reason or str(error)
                continue
            return smaller
        raise ValueError(
            f"run.recovery.min_dp={least}: no smaller data-parallel size from {group}.dp={least} to"
            f" {most} is possible: {reason}"
        )

    def _check_stages(self, group: str) -> None:
        num_chunks = self.pp * (self.vpp or 1)
        if self.stage_layers and len(self.stage_layers) != num_chunks:
            raise ValueError(
                f"{group}.stage_layers={self.stage_layers} names {len(self.stage_layers)} stages:"
                f" {group}.pp * {group}.vpp makes {num_chunks}; give a number for each"
            )
        if any(layers < 1 for layers in self.stage_layers):
            raise ValueError(
                f"{group}.stage_layers={self.stage_layers}: every stage needs a layer or more"
            )

    @property
    def dp_size(self) -> int:
        """Data-parallel size of the dense layers."""
        if self.dp is not None:
            return self.dp
        dense_ranks = self.tp * self.cp
        expert_ranks = self.ep * self.etp
        return next(n for n in range(1, expert_ranks + 1) if dense_ranks * n % expert_ranks == 0)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp_size


@dataclass
class OptimizerConfig(Options):
    name: Literal["adam", "muon", "lion"] = "adam"
    """adam; muon: makes the update of each weight matrix orthogonal, and leaves embeddings, the
    output layer, routers, norms, biases and vision towers to Adam; lion: the sign of a mean of
    gradients (arXiv:2302.06675, algorithm 2), which wants a third to a tenth of Adam's lr."""
    lr: float = bounded(1e-6, gt=0)
    """Learning rate at the end of the warm-up."""
    min_lr: float = bounded(0.0, ge=0)
    """Learning rate at the end of schedule=linear or cosine."""
    vision_lr: float | None = bounded(None, gt=0)
    """Learning rate of a model's vision tower, projector included, on the same schedule; None:
    lr."""
    warmup_steps: int = bounded(0, ge=0)
    """Optimizer steps of this model in which the rate rises to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes on from there to the model's last optimizer step of the run."""
    weight_decay: float = bounded(0.0, ge=0)
    """Decoupled weight decay (AdamW) of all but norms, biases and other vectors."""
    beta1: float = bounded(0.9, ge=0, lt=1)
    """Adam's decay of the mean of gradients; Lion's share of it in an update."""
    beta2: float = bounded(0.98, ge=0, lt=1)
    """Adam's decay of the mean of squared gradients; Lion's of the mean of gradients."""
    eps: float = bounded(1e-8, gt=0)
    """Adam's addend to the root of the mean square; Lion has none."""
    clip_grad: float = bounded(1.0, ge=0)
    """Largest norm of the gradient; 0: not clipped."""
    max_nonfinite: int = bounded(3, ge=0)
    """Optimizer steps in a row that are left out because loss or gradient is not finite; one more
    ends the run. 0: the first one does (docs/debugging.md)."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's OptimizerConfig (docs/upstream_options.md)."""

    def check(self, group: str) -> None:
        """Raise ValueError, naming the options by their `group`, if they contradict one another."""
        if self.min_lr > self.lr:
            raise ValueError(
                f"{group}.min_lr={self.min_lr:g} is above {group}.lr={self.lr:g}: schedules fall"
                f" from lr to min_lr; lower {group}.min_lr"
            )


@dataclass
class UpdatesConfig(Options):
    """How a model is trained on the rollouts of a run: the policy, or the critic."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mini_batches: int = bounded(1, ge=1)
    """Optimizer steps per pass over a rollout."""
    epochs: int = bounded(1, ge=1)
    """Passes over a rollout."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's TransformerConfig; the critic has its own on top of the
    policy's (docs/upstream_options.md)."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of megatron-core's DistributedDataParallelConfig; the critic has its own on
    top of the policy's (docs/upstream_options.md)."""


@dataclass
class FactorsConfig(Options):
    """Low-rank factors that are trained in the place of a model's weights."""

    rank: int = bounded(0, ge=0)
    """Rows of the factor A and columns of B, whose product is added to each adapted matrix; 0: all
    weights are trained (docs/lora.md)."""
    alpha: float = bounded(32.0, gt=0)
    """The product is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that are adapted, by the names of their HuggingFace modules as in PEFT: q_proj,
    o_proj, gate_proj; empty: all, without embeddings, output layer and routers."""
    experts: bool = True
    """Adapt the linear layers of routed experts, each expert for itself."""

    @property
    def total_rank(self) -> int:
        """Ranks of all factors of a matrix together."""
        return self.rank


@dataclass
class AdapterConfig(Options, group="train.lora.adapters"):
    """One of several adapters that a run trains in turns."""

    name: str = ""
    """Name by which requests to engines, checkpoints and metrics have it."""
    data: list[str] = field(default_factory=list)
    """Files of its prompts, as in data.train."""
    eval: list[str] = field(default_factory=list)
    """Files of held-out prompts that it answers in evaluations, whose metrics have its name."""
    rank: int = bounded(0, ge=0)
    """Rank of its factors; 0: train.lora.rank."""
    alpha: float = bounded(0.0, ge=0)
    """Its product is multiplied by alpha / rank; 0: train.lora.alpha."""
    path: str = ""
    """Folder of an adapter in PEFT's format that it starts from; empty: A is random and B is 0."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options of train.lora that are its own."""
        given = {"rank": self.rank, "alpha": self.alpha}
        own = {name: value for name, value in given.items() if value}
        return {"name": self.name, "path": self.path, **own}


@dataclass
class LoraConfig(FactorsConfig, group="train.lora"):
    """Factors of the policy, and how they come to engines."""

    adapters: list[AdapterConfig] = field(default_factory=list)
    """Several adapters that are trained in turns, a step each, over the same frozen weights; empty:
    one, of the options above (docs/lora.md)."""
    path: str = ""
    """Folder of an adapter in PEFT's format to start from, of this rank, alpha and targets; empty:
    A is random and B is 0."""
    sync: Literal["auto", "factors", "merged", "adapter"] = "auto"
    """Tensors that travel to engines. factors: A and B, which engines merge into weights that they
    keep; merged: all weights, as without factors; adapter: A and B, which engines serve beside the
    weights below them; auto: factors with rollout.stage_weights=true."""
    name: str = "policy"
    """Name by which requests to engines choose the adapter, with sync=adapter; requests that name
    none get it, too."""
    engine_base: Literal["host", "gpu"] = "host"
    """Where engines keep the weights that they merge factors into."""

    @property
    def total_rank(self) -> int:
        """Ranks of all adapters together."""
        return sum(own.rank for own in self.list_adapters().values())

    @property
    def most_rank(self) -> int:
        """The largest rank of an adapter."""
        return max(own.rank for own in self.list_adapters().values())

    def list_adapters(self) -> "dict[str, LoraConfig]":
        """Return the options of each of `adapters` by its name; without them, these by ""."""
        if not self.adapters:
            return {"": self}
        return {own.name: replace(self, adapters=[], **own.settings) for own in self.adapters}


@dataclass
class TrainConfig(UpdatesConfig, group="train"):
    max_tokens_per_microbatch: int = bounded(4096, ge=1)
    """Tokens of packed sequences that a data-parallel rank computes at once."""
    logprob_chunk: int = bounded(1024, ge=1)
    """Tokens whose logits are in memory as float32 at once, to compute log-probs and gradients;
    more take more memory, fewer more kernel launches."""
    share_prefixes: bool = False
    """Compute what sequences of a micro-batch have in common at their beginning once: the prompt
    of a group's samples, the turns before a fork (docs/packing.md)."""
    recompute: str = "none"
    """Parts that the backward pass computes again instead of keeping them. none; full: whole
    layers; modules by megatron-core's names, joined by "+": layernorm, moe_act, moe,
    shared_experts, mlp, mla_up_proj, core_attn; selective: the cheap ones, layernorm+moe_act."""
    expert_gemm: ExpertGemm = "separate"
    """How tokens are multiplied by experts. separate: a launch for each expert, by Transformer
    Engine's layer; grouped_mm: one launch of torch's for all experts, whose counts of tokens stay
    on the device. Not in FP8, and not for experts with biases."""
    router_replay: Literal["none", "old_pass", "engine"] = "none"
    """Experts that tokens are sent to in train steps. none: the router's own choice; old_pass:
    those of the pass for the old log-probs; engine: those of the engine that sampled, in that
    pass as well."""
    indexer_replay: Literal["none", "engine"] = "none"
    """Keys that tokens attend to in models with sparse attention. none: those that the trainer's
    indexers choose; engine: those that the engine sampled with (docs/moe.md)."""
    indexer_loss: float = bounded(0.0, ge=0)
    """Weight of a loss that teaches indexers of sparse attention which keys attention weighs most;
    0: they stay as they were loaded (docs/moe.md)."""
    mtp_loss: float = bounded(0.0, ge=0)
    """Weight of a loss that teaches layers for multi-token prediction, which exports contain and
    engines use with rollout.speculate=mtp; 0: they are carried along as loaded (docs/mtp.md)."""
    router_aux_loss_coef: float = bounded(0.0, ge=0)
    """Weight of a loss that balances the experts' load in each micro-batch."""
    router_sequence_aux_loss_coef: float = bounded(0.0, ge=0)
    """Weight of a loss that balances the experts' load in each sequence."""
    router_bias_rate: float = bounded(0.0, ge=0)
    """How far each optimizer step moves the experts' bias toward an even load, in models with
    such a bias."""
    vision: Literal["all", "projector", "none"] = "all"
    """Which weights of a model's vision tower are trained. all; projector: those that turn the
    tower's output into embeddings; none. Without a tower it has no effect."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    fake_quantization: Literal["none", "fp8", "int4"] = "none"
    """Precision that weights are rounded to in every pass, as engines compute with them, while the
    optimizer updates the weights themselves. fp8: projections in blocks of 128 x 128; int4: routed
    experts in groups of 32 columns (docs/models.md)."""
    freeze_router: bool = False
    """Train all weights except the routers', which stay bit for bit as they were loaded."""

    @property
    def recomputed(self) -> frozenset[str]:
        """Return what the backward pass computes again, by megatron-core's names of modules."""
        modules = {"none": "", "selective": SELECTED}.get(self.recompute, self.recompute)
        return frozenset(filter(None, modules.split("+")))

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = self.recomputed - RECOMPUTABLE
        if unknown and self.recomputed != WHOLE_LAYERS:
            raise ValueError(
                f"train.recompute={self.recompute}: expected none, selective, full, or modules"
                f" joined by '+' from {', '.join(sorted(RECOMPUTABLE))}"
            )
        for name in ("router_aux_loss_coef", "router_sequence_aux_loss_coef", "router_bias_rate"):
            value = getattr(self, name)
            if value and self.freeze_router:
                raise ValueError(
                    f"train.{name}={value}: a frozen router learns no balance; set train.{name}=0"
                )


@dataclass
class CriticLoraConfig(FactorsConfig, group="critic.lora"):
    """Factors of the critic, whose value head is trained as a whole beside them."""


@dataclass
class CriticConfig(UpdatesConfig, group="critic"):
    """The critic that algorithm.advantage=gae needs."""

    path: str = ""
    """HuggingFace directory or hub id to start from: a policy, or a reward model with one
    label; empty: model.path."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    lora: CriticLoraConfig = field(default_factory=CriticLoraConfig)
    warmup_steps: int = bounded(0, ge=0)
    """First loop steps in which only the critic learns; the policy's learning rate begins its
    schedule after them."""
    gae_lambda: float = bounded(1.0, ge=0, le=1)
    """Lambda of the returns that the critic learns; 1: the discounted rewards themselves."""
    value_clip: float = bounded(0.2, ge=0)
    """Distance from the value before the step beyond which a value gets no more gradient; 0:
    unlimited."""
    colocated: bool = False
    """Run in turns with the trainer ranks on their GPUs, rank by rank; otherwise on GPUs of its
    own."""


@dataclass
class TuningConfig(Options):
    """How a model is trained on data that nobody samples: conversations, or pairs."""

    steps: int = bounded(100, ge=1)
    """Optimizer steps."""
    batch_size: int = bounded(64, ge=1)
    """Conversations or pairs per optimizer step."""
    max_len: int = bounded(1024, ge=1)
    """Tokens of a sequence, at most."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class SftConfig(TuningConfig, group="sft"):
    data: list[str] = field(default_factory=list)
    """Parquet or jsonl with a `messages` list that ends with the assistant's answer."""


@dataclass
class DpoConfig(TuningConfig, group="dpo"):
    data: list[str] = field(default_factory=list)
    """Parquet or jsonl with `prompt`, `chosen` and `rejected`, as text or as messages."""
    held_out: list[str] = field(default_factory=list)
    """Files of the same kind; every eval.every_steps the share of these pairs that the policy
    ranks right is logged."""
    prompts: int = bounded(0, ge=0)
    """`mcore-rl pairs`: number of prompts of data.train to sample; 0: all."""
    pairs_per_prompt: int = bounded(1, ge=1)
    """`mcore-rl pairs`: largest number of pairs per prompt."""
