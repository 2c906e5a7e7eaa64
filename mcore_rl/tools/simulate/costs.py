"""Predicts the seconds of an engine's and a trainer's work, from config.json, layout and hardware.

Each cost is a sum of what an accelerator does one after the other: operations, reads of its memory,
bytes over links, and a fixed time. Operations are counted as in weights/hf/flops.py. A vision tower
sees the image of a simulated prompt, the most nearly square one of simulate.image_tokens tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rl.config import (
    Config,
    DataConfig,
    ParallelConfig,
    PlanConfig,
    RolloutConfig,
    SimulateConfig,
    TrainConfig,
)
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.engine_memory import predict_engine
from mcore_rl.planning.memory import predict_critic, predict_trainer
from mcore_rl.planning.peak_memory import Uses
from mcore_rl.planning.recipe_models import PlannedRun, RecipeModels
from mcore_rl.planning.sync import predict_sync
from mcore_rl.tools.simulate.kv_cache import EngineSpeed
from mcore_rl.tools.simulate.virtual_time import GPUS, GpuRates, ReachedShares
from mcore_rl.tools.simulate.workload import prompt_len_of
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import BACKWARD, ModelFlops, TowerFlops
from mcore_rl.weights.models.value_head import add_value_head


@dataclass(frozen=True)
class TowerCosts:
    """Seconds of one rank for an image; no layout cuts the tower (docs/vision.md).

    forward_s   of a forward pass
    step_s      of forward and backward passes, by train.vision, with what is computed again
    prefill_s   of an engine's ranks, which divide the tower
    """

    forward_s: float
    step_s: float
    prefill_s: float

    @staticmethod
    def make(
        facts: ModelFacts,
        num_tokens: int,
        train: TrainConfig,
        engine_tp: int,
        gpu: GpuRates,
        shares: ReachedShares,
    ) -> "TowerCosts | None":
        """Return the costs of a model's tower; None without a tower or without images.

        num_tokens   tokens that stand for an image; 0: prompts have none
        """
        flops = TowerFlops.from_facts(facts)
        if flops is None or not num_tokens:
            return None
        image = [flops.square(num_tokens)]
        step = flops.count_training(image, train.vision)
        if train.vision == "all" and train.recompute != "none":
            step += flops.blocks(image)
        per_second = gpu.count_training(has_experts=False)
        return TowerCosts(
            flops.count_forward(image) / per_second,
            step / per_second,
            flops.count_forward(image) / (gpu.flops * shares.prefill * engine_tp),
        )


RECOMPUTED = {"mlp": 0.4, "moe": 0.6, "core_attn": 0.2, "mla_up_proj": 0.1, "full": 1.0}
"""Share of a forward pass that is computed again in the backward pass, by train.recompute."""
EXPERT_BYTES = {"fp8": 1.0, "int4": 0.5625}
"""rollout.quantization -> bytes of a parameter of an expert."""
LOGPROB_BYTES = 8
"""Bytes of a token and its log-prob as ranks read them from the stores."""
ADVANTAGE_S_PER_TOKEN = 0.3e-6
"""Seconds of a collector's core for the advantage of a token, its reads and writes included.

One core took 0.27 to 0.37 us for `gae` and for `reinforce_plus_plus` with 512 responses of 2,000.
"""
READ_BACK_CPU_S_PER_GB = 0.13
"""Seconds in which a core packs and sums a GB of live parameters (docs/sync.md)."""
Lengths = Sequence[Sequence[Sequence[int]]]
"""Lengths of sequences, by data-parallel coordinate and micro-batch."""
Images = Sequence[Sequence[int]]
"""Distinct images of each micro-batch, by data-parallel coordinate; none at all may be given."""


def engine_speed(
    run: PlannedRun, simulate: SimulateConfig, data: DataConfig, shares: ReachedShares
) -> EngineSpeed:
    """Return the speed of one of the recipe's engines."""
    rollout = run.rollout
    facts = run.models.policy
    gpu = GPUS[simulate.gpu]
    uses = predict_engine(run)
    weights = sum(stage["weights"] for stage in uses)
    per_token = sum(stage["KV cache"] for stage in uses) / rollout.kv_cache_len
    memory = gpu.memory * shares.memory
    rows = range(rollout.max_concurrency + 1)
    flops = ModelFlops.from_facts(facts)
    model = facts, flops, run.dtype, weights
    fixed = [_decode_s(num, *model, rollout, run.plan, gpu, shares) for num in rows]
    per_second = gpu.flops * shares.prefill * rollout.tp
    row_s = len(facts.moe_layers) * gpu.row_s
    tower = TowerCosts.make(facts, simulate.image_tokens, run.train, rollout.tp, gpu, shares)
    prompt_len = prompt_len_of(simulate, data)

    def prefill_s(num_tokens: int) -> float:
        seconds = flops.count_forward((num_tokens,)) / per_second + row_s
        # Fewer tokens are a response whose prompt, with its image, is cached.
        return seconds + (tower.prefill_s if tower and num_tokens >= prompt_len else 0.0)

    # Each attention group has a KV cache of its own for its share of the requests.
    groups = rollout.attention_dp
    per_context_s = per_token / groups / memory
    capacity = rollout.kv_cache_len * groups
    shares_prompts = rollout.share_prompts
    if shares_prompts is None:
        shares_prompts = simulate.gpu == "cpu"
    return EngineSpeed(fixed, per_context_s, prefill_s, capacity, shares_prompts)


def _decode_s(
    num_running: int,
    facts: ModelFacts,
    flops: ModelFlops,
    dtype: str,
    weights: float,
    rollout: RolloutConfig,
    plan: PlanConfig,
    gpu: GpuRates,
    shares: ReachedShares,
) -> float:
    """Return the seconds of a decode step of so many requests, apart from their context.

    weights   bytes that a rank of each stage holds, all stages together
    """
    read = weights
    if facts.has_experts:
        size = EXPERT_BYTES.get(rollout.quantization, itemsize(dtype))
        experts = _expert_numbers(facts) * size / rollout.tp
        untouched = (1 - facts.experts_per_token / facts.num_experts) ** num_running
        read -= experts * untouched
    operations = flops.per_token * num_running
    compute_s = operations / (gpu.flops * shares.decode_flops * rollout.tp)
    layers = len(facts.moe_layers)
    moved = 4 * num_running * facts.sizes["hidden"] * itemsize(dtype)
    link = _link(rollout.tp, plan, gpu, shares)
    moved_s = layers * moved / link if rollout.tp > 1 else 0.0
    is_remote = rollout.tp > plan.ranks_per_host
    layer_s = shares.remote_layer_s if is_remote else shares.layer_s
    memory_s = read / (gpu.memory * shares.memory)
    rows_s = num_running * gpu.row_s
    return max(compute_s, memory_s) + moved_s + layers * (layer_s + rows_s) + shares.step_s


def _expert_numbers(facts: ModelFacts) -> int:
    """Return the parameters of all routed experts."""
    sizes = facts.sizes
    per_layer = sizes["experts"] * 3 * sizes["hidden"] * sizes["expert_ffn"]
    return sum(facts.moe_layers) * per_layer


def _link(num_ranks: int, plan: PlanConfig, gpu: GpuRates, shares: ReachedShares) -> float:
    """Return the bytes per second at which each of `num_ranks` neighbors reaches the others."""
    if num_ranks <= plan.ranks_per_host:
        return gpu.link * shares.link
    return plan.link_gbps * 1e9 / 8 * shares.network


@dataclass(frozen=True)
class ModelState:
    """Bytes that a rank of the fullest stage keeps between steps."""

    weights: float
    gradients: float
    optimizer: float

    @staticmethod
    def make(stages: Sequence[Uses]) -> "ModelState":
        """`stages` as planning.memory.predict_trainer returns them."""
        return ModelState(
            *(max(uses[name] for uses in stages) for name in ("weights", "gradients", "optimizer"))
        )

    @property
    def training(self) -> float:
        """Bytes apart from the weights."""
        return self.gradients + self.optimizer


@dataclass(frozen=True)
class TrainCosts:
    """Seconds of a model's ranks in training.

    reads_experts   ranks read the experts of sampled tokens (drift.routed_experts)
    """

    train: TrainConfig
    plan: PlanConfig
    dtype: str
    reads_experts: bool
    facts: ModelFacts
    flops: ModelFlops
    parallel: ParallelConfig
    gpu: GpuRates
    shares: ReachedShares
    state: ModelState
    factor: float = 1.0
    """Measured over predicted seconds."""
    tower: TowerCosts | None = None
    """None if prompts have no images."""

    def with_slow_ranks(self, simulate: SimulateConfig) -> "TrainCosts":
        """Return the costs where a share of the ranks is slow: all wait for the slowest."""
        if not round(simulate.slow_ranks * self.parallel.world_size):
            return self
        return replace(self, factor=self.factor * simulate.slowdown)

    def step_s(self, microbatches: Lengths, images: Images = ()) -> float:
        """Return the seconds of an optimizer step."""
        num_forward = 1 + BACKWARD + self._find_recomputed_share()
        image_s = self.tower.step_s if self.tower else 0.0
        passes_s = self._passes_s(microbatches, num_forward, images, image_s)
        return self.factor * (passes_s + self._update_s())

    def forward_s(self, microbatches: Lengths, images: Images = ()) -> float:
        """Return the seconds of a forward pass over all micro-batches."""
        image_s = self.tower.forward_s if self.tower else 0.0
        return self.factor * self._passes_s(microbatches, 1.0, images, image_s)

    def _passes_s(
        self, microbatches: Lengths, num_forward: float, images: Images, image_s: float
    ) -> float:
        """Return the seconds of the slowest data-parallel coordinate.

        A pipeline takes the sum of its micro-batches, and the longest once more for each further
        stage, divided by the chunks of a stage where it is interleaved.
        """
        pp = self.parallel.pp
        slowest = 0.0
        for coordinate, lens_by_microbatch in enumerate(microbatches):
            nums = images[coordinate] if images else [0] * len(lens_by_microbatch)
            times = [
                self._microbatch_s(lens, num_forward, num * image_s)
                for lens, num in zip(lens_by_microbatch, nums, strict=True)
            ]
            bubble = (pp - 1) * max(times, default=0.0) / (self.parallel.vpp or 1)
            slowest = max(slowest, sum(times) + bubble)
        return slowest + self.shares.call_s

    def _microbatch_s(self, lens: Sequence[int], num_forward: float, tower_s: float) -> float:
        """Return the seconds of one micro-batch in the slowest stage.

        tower_s   seconds of the tower, which is in the first stage
        """
        first, *others = self._stages
        layers_s = self._layers_s(lens, num_forward)
        slowest_s = max(first * layers_s + tower_s, max(others, default=0.0) * layers_s)
        return slowest_s + self.shares.microbatch_s / self.parallel.pp

    def _layers_s(self, lens: Sequence[int], num_forward: float) -> float:
        """Return the seconds of one micro-batch in all layers, as if one stage had them."""
        parallel = self.parallel
        num_tokens = sum(lens)
        forward = self.flops.count_forward(lens)
        flops_s = forward * num_forward / self._flops(parallel.tp * parallel.cp)
        layers = self._num_layers
        own_tokens = num_tokens / (parallel.tp * parallel.cp)
        row = self.facts.sizes["hidden"] * itemsize(self.dtype)
        moved_s = 0.0
        if parallel.tp > 1:  # gathered and scattered around attention and around the MLP
            moved = 4 * num_tokens / parallel.cp * row
            moved_s += layers * num_forward * moved / self._link(parallel.tp)
        if self.facts.has_experts and parallel.ep > 1:
            moved_s += layers * num_forward * 2 * self._dispatch_s(own_tokens * row)
        return flops_s + moved_s

    def _dispatch_s(self, num_bytes: float) -> float:
        """Return the seconds to bring the hidden states of a rank's tokens to their experts.

        DeepEP sends a token once to each host with experts of it, and from there to the ranks.
        """
        ranks = self.parallel.ep * self.parallel.etp
        hosts = -(-ranks // self.plan.ranks_per_host)
        copies = self.facts.experts_per_token * (1 - 1 / ranks)
        local_s = num_bytes * copies / (self.gpu.link * self.shares.link)
        if hosts == 1:
            return local_s
        remote = self.facts.experts_per_token * (1 - 1 / hosts)
        if self.train.megatron.get("moe_flex_dispatcher_backend") == "deepep":
            remote = (hosts - 1) * (1 - (1 - 1 / hosts) ** self.facts.experts_per_token)
        network = self.plan.link_gbps * 1e9 / 8 * self.shares.network
        return max(local_s, num_bytes * remote / network)

    def _update_s(self) -> float:
        """Return the seconds to reduce gradients, to update weights and to gather them."""
        state = self.state
        touched = 2 * (state.optimizer + state.weights) + state.gradients
        update_s = touched / (self.gpu.memory * self.shares.memory)
        if self.parallel.dp_size == 1:
            return update_s
        moved = state.gradients + state.weights
        return update_s + moved / self._link(self.parallel.world_size)

    def read_s(self, num_tokens: int) -> float:
        """Return the seconds in which a data-parallel coordinate reads its share of samples."""
        per_token: float = LOGPROB_BYTES
        if self.facts.has_experts and self.reads_experts:
            size = 1 if self.facts.num_experts <= 256 else 2
            layers = sum(self.facts.moe_layers) * max(self._stages)
            per_token += layers * self.facts.experts_per_token * size
        network = self.plan.link_gbps * 1e9 / 8 * self.shares.network
        return num_tokens * per_token / network

    def compute_advantages_s(self, num_tokens: int, num_far: int) -> float:
        """Return the seconds in which a collector computes the advantages of tokens.

        num_far   those of `num_tokens` that the collector reads from other collectors
        """
        network = self.plan.link_gbps * 1e9 / 8 * self.shares.network
        return num_tokens * ADVANTAGE_S_PER_TOKEN + num_far * LOGPROB_BYTES / network

    def offload_s(self, num_bytes: float) -> float:
        """Return the seconds to move bytes between GPU and host memory."""
        return num_bytes / self.gpu.host_link

    @property
    def saved_bytes(self) -> float:
        """Bytes of a checkpoint that the fullest rank writes."""
        return self.state.weights + self.state.optimizer

    @property
    def save_s(self) -> float:
        """Seconds of a copy to host memory; what writes it works beside the steps."""
        return self.offload_s(self.saved_bytes)

    def _find_recomputed_share(self) -> float:
        parts = self.train.recomputed
        return min(sum(RECOMPUTED.get(part, 0.0) for part in parts), 1.0)

    @cached_property
    def _num_layers(self) -> int:
        return len(self.facts.moe_layers)

    @cached_property
    def _stages(self) -> list[float]:
        """The share of the model that each stage has."""
        layers = self._num_layers
        chunks = self.parallel.stage_layers
        pp = self.parallel.pp
        if chunks:
            return [sum(chunks[stage::pp]) / layers for stage in range(pp)]
        return [-(-layers // pp) / layers] * pp

    def _flops(self, num_ranks: int) -> float:
        return self.gpu.count_training(has_experts=self.facts.has_experts) * num_ranks

    def _link(self, num_ranks: int) -> float:
        return _link(num_ranks, self.plan, self.gpu, self.shares)


def swap_s(weights: float, gpu: GpuRates, shares: ReachedShares) -> float:
    """Return the seconds for which an engine pauses to swap weights that it has received.

    weights   bytes of the fullest rank
    """
    return shares.pause_s + 2 * weights / (gpu.memory * shares.memory)


def read_back_s(weights: float, gpu: GpuRates, shares: ReachedShares) -> float:
    """Return the seconds for which a pause is longer if the sync is read back.

    It takes as long as to copy a rank's weights once (docs/sync.md).

    weights   bytes of the fullest rank
    """
    if gpu is GPUS["cpu"]:
        return READ_BACK_CPU_S_PER_GB * weights / 1e9
    return 2 * weights / (gpu.memory * shares.memory)


PARITY_CHECK_S = 0.5


@dataclass(frozen=True)
class RecipeCosts:
    """Predicted seconds and sizes of a recipe, made once.

    parity_check_s   seconds in which the trainer, and then the engines, score a few sequences
    other_s    seconds of a step for what is not simulated
    of_idle    whether the seconds of sync and parity check are those of idle engines, as a run in
               rollout.mode=sync has them; engines that sample meanwhile finish a step before
    read_back_s   by which the swap takes longer in a sync that is read back
    """

    engine: EngineSpeed
    trainer: TrainCosts
    critic: TrainCosts | None
    sync_s: float
    swap_s: float
    sync_bytes: int
    parity_check_s: float = PARITY_CHECK_S
    other_s: float = 0.0
    of_idle: bool = False
    read_back_s: float = 0.0

    @staticmethod
    def make(
        config: Config, shares: ReachedShares, models: RecipeModels | None = None
    ) -> "RecipeCosts":
        """Return the costs of a recipe; without `models`, they are read.

        Raises ValueError naming two sizes that do not divide.
        """
        run = PlannedRun.make(config, models)
        models = run.models
        gpu = GPUS[config.simulate.gpu]
        policy = models.policy
        plan, _ = predict_sync(run, make_deployment(run))
        state = ModelState.make(predict_trainer(run))
        flops = ModelFlops.from_facts(policy.choose_trained(run.train.mtp_loss))
        image_tokens = config.simulate.image_tokens
        images = image_tokens, config.train, config.rollout.tp, gpu, shares
        recipe = config.train, config.plan, config.model.dtype, config.drift.routed_experts
        tower = TowerCosts.make(policy, *images)
        trainer = TrainCosts(
            *recipe, policy, flops, config.parallel, gpu, shares, state, tower=tower
        )
        critic = None
        if models.critic is not None:
            state = ModelState.make(predict_critic(run))
            parallel = config.critic.parallel
            facts = ModelFacts(models.critic.path, add_value_head(models.critic.config))
            flops = ModelFlops.from_facts(facts)
            tower = TowerCosts.make(facts, *images)
            critic = TrainCosts(*recipe, facts, flops, parallel, gpu, shares, state, tower=tower)
        weights = max(stage["weights"] for stage in predict_engine(run))
        return RecipeCosts(
            engine_speed(run, config.simulate, config.data, shares),
            trainer,
            critic,
            plan.seconds / shares.network,
            swap_s(weights, gpu, shares),
            plan.model_bytes,
            read_back_s=read_back_s(weights, gpu, shares),
        )
