"""Predicts the bytes of GPU memory that each kind of rank takes, from a recipe and its config.json.

trainer       weights, gradients, optimizer, activations, logits
engine        weights, KV cache
shared GPUs   the fullest of several moments, each with what nobody has released by then
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config, ParallelConfig, ServedModelConfig, TrainConfig
from mcore_rl.planning.activations import FLOAT32, Activations, Pass
from mcore_rl.planning.deployment import engine_links, engine_sizes, record_layouts, relays
from mcore_rl.planning.models import RecipeModels
from mcore_rl.planning.moments import shared_gpus
from mcore_rl.planning.rank_memory import RankMemory, Side, Uses, stage_name
from mcore_rl.slices.box import itemsize
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.families.value_head import has_value_head, with_value_head
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.layouts.layout import Layout, boxes_of
from mcore_rl.slices.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.stream.bucket_transfer import NUM_SLOTS

ADAM_BYTES = 8
"""Two float32 moments per parameter; models in bfloat16 also have a float32 main weight."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank.

    `expert` are those of routed experts, whose optimizer state is divided over other ranks than the
    state of the rest.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_parameters(layout: MegatronLayout, sizes: MegatronSizes, stage: int) -> Parameters:
    """Parameters of each rank of a pipeline stage, vocabulary padding included."""
    counts = {False: 0, True: 0}
    rank = stage * sizes.stage_ranks
    for entry, numel in layout.held(rank):
        if entry.tensor.dtype is not None:
            continue  # a buffer, such as the bias that chooses experts
        if entry.rule.padded and numel:
            numel = sizes.padded_vocab // sizes.tp * prod(entry.shape[1:])
        counts[entry.rule.has_expert_axis] += numel
    return Parameters(dense=counts[False], expert=counts[True])


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
        ranks += _own_gpus("critic", _critic(config, models), config.critic.parallel)
    if side in (None, "engine") and not config.cluster.colocated:
        ranks += _engine_ranks(_engines(config, models.policy))
    return ranks


def _trainer_gpus(config: Config, models: RecipeModels) -> Iterable[RankMemory]:
    parallel = config.parallel
    trainer = _trained(config, models.policy.config, parallel, sends=True)
    shares_critic = needs_of(config.algorithm).critic and config.critic.colocated
    critic = _critic(config, models) if shares_critic else []
    engines = _engines(config, models.policy) if config.cluster.colocated else []
    served = {
        role: _served_bytes(model)
        for role, model in config.served_models.items()
        if model.is_colocated
    }
    if critic or engines or served:
        offload = config.cluster.offload
        checks = _sync_checks(config, models.policy.config)
        return shared_gpus(parallel, offload, trainer, critic, engines, served, checks)
    return _own_gpus("trainer", trainer, parallel)


def _sync_checks(config: Config, hf_config: HfConfig) -> list[float]:
    """Bytes of each stage's forward pass over the sequences that check a weight sync."""
    parallel = config.parallel
    if not config.canary.sequences:
        return [0.0] * parallel.pp
    sizes = MegatronSizes.of(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, config.model.dtype)
    num_tokens = config.canary.sequences * (
        config.data.max_prompt_len + config.rollout.max_response_len
    )
    train = replace(
        config.train,
        max_tokens_per_microbatch=min(num_tokens, config.train.max_tokens_per_microbatch),
        recompute="none",
    )
    step = _pass(config.model.dtype, parallel, train, config.plan.expert_load)
    activations = Activations(hf_config, step)
    checks = []
    for stage in range(parallel.pp):
        layers = [layer for run in layout.stage_layers(stage) for layer in run]
        num_bytes = max(activations.working(layer) for layer in layers)
        if stage == parallel.pp - 1:
            num_bytes += activations.logits(sizes.padded_vocab)
        checks.append(num_bytes)
    return checks


def _critic(config: Config, models: RecipeModels) -> list[Uses]:
    assert models.critic is not None, "a recipe with a critic was read without one"
    critic = with_value_head(models.critic.config)
    return _trained(config, critic, config.critic.parallel, sends=False)


def _trained(
    config: Config, hf_config: HfConfig, parallel: ParallelConfig, *, sends: bool
) -> list[Uses]:
    """Bytes per purpose of a rank of each pipeline stage of a model in training."""
    sizes = MegatronSizes.of(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, config.model.dtype)
    step = _pass(config.model.dtype, parallel, config.train, config.plan.expert_load)
    activations = Activations(hf_config, step)
    stages = []
    for stage in range(parallel.pp):
        uses = _states(stage_parameters(layout, sizes, stage), parallel, sizes, config.model.dtype)
        uses["activations"] = _passes(activations, parallel, layout.stage_layers(stage), stage)
        if stage == parallel.pp - 1 and not has_value_head(hf_config):
            uses["logits and log-probs"] = activations.logits(sizes.padded_vocab)
        if sends:
            uses["sync buffers"] = config.rollout.engines * _slots(config.sync.bucket_mib)
        stages.append(uses)
    return stages


def _states(count: Parameters, parallel: ParallelConfig, sizes: MegatronSizes, dtype: str) -> Uses:
    """Weights, gradients and share of the optimizer of one rank with `count` parameters."""
    state = ADAM_BYTES + (FLOAT32 if dtype != "float32" else 0)
    replicas = parallel.dp_size * parallel.cp
    expert_replicas = sizes.stage_ranks // (parallel.ep * parallel.etp)
    return {
        "weights": count.total * itemsize(dtype),
        "gradients": count.total * FLOAT32,
        "optimizer": state * (count.dense / replicas + count.expert / expert_replicas),
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
        recompute=train.recompute,
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


def _engines(config: Config, policy: ModelFacts) -> list[Uses]:
    """Bytes per purpose of a rank of each of an engine's pipeline stages."""
    rollout = config.rollout
    one_engine = replace(engine_sizes(rollout), engines=1)
    target = record_layouts(config, policy, one_engine).target()
    attention_tp = rollout.tp // rollout.attention_dp
    size = itemsize(config.model.dtype)
    num_links = engine_links(rollout.engines, relays(config))
    buffers = num_links * _slots(config.sync.bucket_mib)
    stages = []
    for stage in range(rollout.pp):
        first_rank = stage * rollout.tp
        num_layers = _num_layers(target, first_rank)
        weights = _bytes(target, first_rank)
        derived = num_layers * _derived_numbers(policy.sizes, attention_tp) * size
        kv_bytes = num_layers * _kv_numbers(policy.sizes, attention_tp) * size
        uses: Uses = {
            "weights": weights + derived,
            "KV cache": rollout.kv_cache_len * kv_bytes,
            "sync buffers": buffers,
        }
        if rollout.stage_weights:
            uses["staged weights"] = weights
        stages.append(uses)
    return stages


def _served_bytes(model: ServedModelConfig) -> float:
    """Bytes of weights per rank, by the size of the model's files; its KV cache is not counted."""
    files = Path(model.path).glob("*.safetensors")
    return sum(path.stat().st_size for path in files) / model.engine_ranks


def _bytes(layout: Layout, rank: int) -> int:
    return sum(box.numel * itemsize(dtype) for box, dtype in boxes_of(layout, rank))


def _num_layers(layout: Layout, rank: int) -> int:
    """Number of layers with a tensor on the rank."""
    names = (name.partition(".layers.")[2] for name in layout.names(rank) if ".layers." in name)
    return len({name.partition(".")[0] for name in names})


def _derived_numbers(sizes: Mapping[str, int], attention_tp: int) -> int:
    """Numbers per layer of the two matrices that SGLang makes of kv_b_proj (latent attention)."""
    if "kv_rank" not in sizes:
        return 0
    return sizes["kv_up"] * sizes["kv_rank"] // attention_tp


def _kv_numbers(sizes: Mapping[str, int], attention_tp: int) -> int:
    """Numbers of the KV cache per token and layer on one rank."""
    if "kv_rank" in sizes:
        return sizes["kv_down"]
    return 2 * max(sizes["kv_heads"] // attention_tp, 1) * sizes["head"]


def _slots(bucket_mib: float) -> int:
    """Bytes of the buffers at one end of a link."""
    return NUM_SLOTS * int(bucket_mib * 2**20)


def _own_gpus(side: Side, stages: list[Uses], parallel: ParallelConfig) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        yield RankMemory(side, stage_name(side, stage, len(stages), parallel), "train step", uses)


def _engine_ranks(stages: list[Uses]) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        which = f" of stage {stage}" if len(stages) > 1 else ""
        yield RankMemory("engine", f"engine ranks{which}", "weight sync", uses)
