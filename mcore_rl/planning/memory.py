"""Predicts the bytes of GPU memory that each kind of rank takes, from a recipe and its config.json.

trainer       weights, gradients, optimizer, activations, logits
engine        weights, KV cache
shared GPUs   the fullest of several moments, each with what nobody has released by then

Predicts the bytes of images and of a vision tower's activations on a rank of the first stage.

Each rank of that stage runs the whole tower on all images of its micro-batch (docs/vision.md), so
neither tensor nor context parallelism makes them fewer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import (
    Config,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.config.upstream import Passed
from mcore_rl.planning.activations import FLOAT32, Activations, Pass
from mcore_rl.planning.engine_memory import engine_uses, served_bytes, sync_buffer_bytes
from mcore_rl.planning.moments import RecipeModels, shared_gpus
from mcore_rl.planning.node_needs import critic_training
from mcore_rl.planning.rank_memory import RankMemory, Side, Uses, stage_name
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import PREFIX, is_frozen, merge_size
from mcore_rl.weights.models.value_head import has_value_head, with_value_head

GATE = PREFIX + "blocks.mlp.gate_proj.weight"
"""Key of a tensor that only blocks with a gated MLP have."""


def tower_activations(hf_config: HfConfig, step: Pass, vision: str, in_flight: float) -> float:
    """Return the bytes of activations if every token of the micro-batch is of an image.

    vision      train.vision; blocks that are not trained keep nothing for a backward pass
    in_flight   micro-batches whose activations the stage keeps
    """
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    num_patches = step.tokens * merge_size(hf_config) ** 2
    hidden = sizes["tower_hidden"]
    # norms' inputs and outputs, queries, keys and values before and after rotation, output; gate,
    # up, activation and product, or the activation's input and output
    is_gated = any(rule.key == GATE for rule in family.rules)
    block = 10 * hidden + (4 if is_gated else 2) * sizes["tower_block_ffn"]
    kept = sizes["tower_blocks"] * (hidden if step.recomputed else block)
    if vision != "all":
        kept = 0
    inner = sizes.get("deepstack_mergers", 0) * _inner_feature(sizes, step, num_patches, vision)
    numbers = num_patches * (in_flight * kept + block) + in_flight * inner
    return numbers * step.itemsize


def received_features(
    hf_config: HfConfig, step: Pass, runs: Sequence[range], in_flight: float
) -> float:
    """Return the bytes of inner features that a stage gets from earlier ones.

    runs        the layers of each of its model chunks
    in_flight   micro-batches whose activations the stage keeps in each chunk
    """
    sizes = family_of(hf_config).sizes(hf_config)
    num_features = sizes.get("deepstack_mergers", 0)
    received = sum(max(num_features - run.start, 0) for run in runs if run.start)
    own_tokens = step.tokens / (step.tp * step.cp)
    return in_flight * received * sizes["hidden"] * own_tokens * step.itemsize


def _inner_feature(sizes: Mapping[str, int], step: Pass, num_patches: int, vision: str) -> float:
    """Return the numbers that features of one inner block take, with those of their projector.

    Each rank has the features of all images, and those of its own tokens.
    """
    features = sizes["hidden"] * (step.tokens + step.tokens / (step.tp * step.cp))
    # the outputs of norm, first layer and activation
    projector = 0 if vision == "none" else 3 * sizes["tower_hidden"] * num_patches
    return features + projector


def pixel_bytes(config: HfConfig, num_tokens: int) -> float:
    """Return the bytes of the pixels of a micro-batch whose tokens all stand for images."""
    sizes = family_of(config).sizes(config)
    num_patches = num_tokens * merge_size(config) ** 2
    return num_patches * sizes["channels"] * sizes["patch_frames"] * sizes["patch"] ** 2 * FLOAT32


MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of Adam's two moments per parameter; by default they are float32."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank.

    `expert` are those of routed experts, whose optimizer state is divided over other ranks than the
    state of the rest. `frozen` of the others are not trained.
    """

    dense: int
    expert: int
    frozen: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(
    layout: MegatronLayout, sizes: MegatronSizes, stage: int, vision: str = "all"
) -> Parameters:
    """Parameters of each rank of a pipeline stage, vocabulary padding included.

    `vision` is train.vision, the part of a vision tower that is trained.
    """
    counts = {False: 0, True: 0}
    frozen = 0
    rank = stage * sizes.stage_ranks
    for entry, numel in layout.held(rank):
        if entry.tensor.dtype is not None:
            continue  # a buffer, such as the bias that chooses experts
        if entry.rule.padded and numel:
            numel = sizes.padded_vocab // sizes.tp * prod(entry.shape[1:])
        counts[entry.rule.has_expert_axis] += numel
        if is_frozen(entry.rule.key, vision):
            frozen += numel
    return Parameters(dense=counts[False], expert=counts[True], frozen=frozen)


def predict_memory(
    config: Config, models: RecipeModels, side: Side | None = None
) -> list[RankMemory]:
    """One entry per kind of rank, of one side or of all.

    Raises ValueError as MegatronLayout and SGLangLayout do.
    """
    ranks: list[RankMemory] = []
    if side in (None, "trainer"):
        ranks += _trainer_gpus(config, models)
    has_critic = needs_of(config.algorithm).critic
    if side in (None, "critic") and has_critic and not config.critic.colocated:
        ranks += _own_gpus("critic", critic_uses(config, models), config.critic.parallel)
    if side in (None, "engine") and not config.cluster.colocated:
        ranks += _engine_ranks(engine_uses(config, models.policy))
    return ranks


def _trainer_gpus(config: Config, models: RecipeModels) -> Iterable[RankMemory]:
    parallel = config.parallel
    trainer = trainer_uses(config, models)
    shares_critic = needs_of(config.algorithm).critic and config.critic.colocated
    critic = critic_uses(config, models) if shares_critic else []
    engines = engine_uses(config, models.policy) if config.cluster.colocated else []
    served = {
        role: served_bytes(model)
        for role, model in config.served_models.items()
        if model.is_colocated
    }
    if critic or engines or served:
        offload = config.cluster.offload
        return shared_gpus(parallel, offload, trainer, critic, engines, served)
    return _own_gpus("trainer", trainer, parallel)


def trainer_uses(config: Config, models: RecipeModels) -> list[Uses]:
    """Bytes per purpose of a trainer rank of each pipeline stage."""
    train = config.train
    hf_config = models.policy.config
    return _trained(config, hf_config, config.parallel, train, train.optimizer, sends=True)


def critic_uses(config: Config, models: RecipeModels) -> list[Uses]:
    """Bytes per purpose of a critic rank of each pipeline stage; the recipe has a critic."""
    assert models.critic is not None, "a recipe with a critic was read without one"
    model = with_value_head(models.critic.config)
    critic = config.critic
    train = critic_training(config.train, critic)
    return _trained(config, model, critic.parallel, train, critic.optimizer, sends=False)


def _trained(
    config: Config,
    hf_config: HfConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    optimizer: OptimizerConfig,
    *,
    sends: bool,
) -> list[Uses]:
    """Bytes per purpose of a rank of each pipeline stage of a model in training."""
    sizes = MegatronSizes.of(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, config.model.dtype)
    step = _pass(config.model.dtype, parallel, train, config.plan.expert_load)
    activations = Activations(hf_config, step)
    per_parameter = _parameter_bytes(config.model.dtype, optimizer.megatron, train.ddp)
    stages = []
    for stage in range(parallel.pp):
        count = stage_parameters(layout, sizes, stage, train.vision)
        uses = _states(count, parallel, sizes, per_parameter)
        runs = layout.stage_layers(stage)
        uses["activations"] = _passes(activations, parallel, runs, stage)
        in_flight = _in_flight(parallel, stage) / len(runs)
        if features := received_features(hf_config, step, runs, in_flight):
            uses["tower's features"] = features
        if stage == 0 and family_of(hf_config).has_tower:
            uses["tower's activations"] = tower_activations(
                hf_config, step, train.vision, in_flight
            )
            uses["pixels"] = in_flight * pixel_bytes(hf_config, step.tokens)
        if stage == parallel.pp - 1 and not has_value_head(hf_config):
            uses["logits and log-probs"] = activations.logits(sizes.padded_vocab)
        if sends:
            uses["sync buffers"] = config.rollout.engines * sync_buffer_bytes(config)
        stages.append(uses)
    return stages


def _parameter_bytes(dtype: str, optimizer: Passed, ddp: Passed) -> Uses:
    """Bytes of each parameter's weight, gradient and optimizer state, before ranks share them.

    A main weight in float32 is kept of weights in bfloat16, and by the precision-aware optimizer of
    all. `optimizer` and `ddp` are options of megatron-core.
    """
    moments = sum(itemsize(optimizer.get(name, "float32")) for name in MOMENTS)
    has_main = dtype != "float32" or optimizer.get("use_precision_aware_optimizer")
    return {
        "weights": itemsize(dtype),
        "gradients": FLOAT32 if ddp.get("grad_reduce_in_fp32", True) else itemsize(dtype),
        "optimizer": moments + (FLOAT32 if has_main else 0),
    }


def _states(
    count: Parameters, parallel: ParallelConfig, sizes: MegatronSizes, per_parameter: Uses
) -> Uses:
    """Weights, gradients and share of the optimizer of one rank with `count` parameters."""
    replicas = parallel.dp_size * parallel.cp
    expert_replicas = sizes.stage_ranks // (parallel.ep * parallel.etp)
    shared = (count.dense - count.frozen) / replicas + count.expert / expert_replicas
    return {
        "weights": count.total * per_parameter["weights"],
        "gradients": (count.total - count.frozen) * per_parameter["gradients"],
        "optimizer": shared * per_parameter["optimizer"],
    }


def _passes(
    activations: Activations, parallel: ParallelConfig, runs: Sequence[range], stage: int
) -> float:
    """Bytes of activations of a stage. `runs`: the layers of each of its model chunks."""
    layers = [layer for run in runs for layer in run]
    in_flight = _in_flight(parallel, stage) / len(runs)
    kept = in_flight * sum(activations.kept(layer) for layer in layers)
    return kept + max(activations.working(layer) for layer in layers)


def _pass(dtype: str, parallel: ParallelConfig, train: TrainConfig, expert_load: float) -> Pass:
    return Pass(
        tokens=train.max_tokens_per_microbatch,
        tp=parallel.tp,
        cp=parallel.cp,
        etp=parallel.etp,
        itemsize=itemsize(dtype),
        recomputed=train.recomputed,
        logprob_chunk=train.logprob_chunk,
        expert_load=expert_load,
    )


def _in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Forward passes a stage makes before its first backward pass (1F1B).

    They are counted by model chunk, as in megatron-core's schedules, interleaved or not
    (get_pp_rank_microbatches).
    """
    behind = parallel.pp - stage - 1
    if parallel.vpp is None:
        return behind + 1
    return 2 * behind + (parallel.vpp - 1) * parallel.pp + 1


def _own_gpus(side: Side, stages: list[Uses], parallel: ParallelConfig) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        yield RankMemory(side, stage_name(side, stage, len(stages), parallel), "train step", uses)


def _engine_ranks(stages: list[Uses]) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        which = f" of stage {stage}" if len(stages) > 1 else ""
        yield RankMemory("engine", f"engine ranks{which}", "weight sync", uses)
