"""Predicts the bytes of GPU memory that each kind of rank takes, from a recipe and its config.json.

trainer, critic   weights, gradients, optimizer, activations, logits
engine            weights, KV cache, buffers of the weight sync
shared GPUs       the fullest of several moments (peak_memory.py)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from mcore_rl.config import ParallelConfig, PlanConfig, TrainConfig
from mcore_rl.config.upstream import Passed
from mcore_rl.planning.activations import (
    FLOAT32,
    Activations,
    Pass,
    count_pixel_bytes,
    count_received_features,
    count_tower_activations,
)
from mcore_rl.planning.adapter_memory import AdapterSize, count_adapter
from mcore_rl.planning.deployment import record_layouts
from mcore_rl.planning.engine_memory import count_served_bytes, predict_engine
from mcore_rl.planning.peak_memory import (
    SENT_EXPERTS,
    UNROUNDED,
    RankMemory,
    Side,
    Uses,
    find_peaks,
    name_stage,
)
from mcore_rl.planning.recipe_models import PlannedRun, make_critic_training
from mcore_rl.planning.resident_memory import SyncMemory, count_pair_bytes
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.hf.int4 import split_part
from mcore_rl.weights.hf.low_precision import Precision, is_rounded
from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.layouts.tensors import Entry
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.tower import PREFIX, is_frozen
from mcore_rl.weights.models.value_head import add_value_head, has_value_head

_NO_MATRICES = ("word_embeddings", "output_layer", "router", "gate_weight", PREFIX)
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
"""Options of Adam's two moments per parameter; by default they are float32."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank.

    `expert` are those of routed experts, whose optimizer state is divided over other ranks than the
    state of the rest. `frozen` of the others are not trained. `matrices` of the dense and of the
    expert ones are what Muon would update.
    """

    dense: int
    expert: int
    frozen: int = 0
    matrices: tuple[int, int] = (0, 0)

    @property
    def total(self) -> int:
        return self.dense + self.expert


def count_parameters(
    layout: MegatronLayout, sizes: MegatronSizes, stage: int, vision: str = "all"
) -> Parameters:
    """Parameters of each rank of a pipeline stage, vocabulary padding included.

    `vision` is train.vision, the part of a vision tower that is trained.
    """
    counts = {False: 0, True: 0}
    matrices = {False: 0, True: 0}
    frozen = 0
    rank = stage * sizes.stage_ranks
    for entry, numel in layout.count_held(rank):
        if entry.tensor.dtype is not None:
            continue  # a buffer, such as the bias that chooses experts
        if entry.rule.padded and numel:
            numel = sizes.padded_vocab // sizes.tp * prod(entry.shape[1:])
        counts[entry.rule.has_expert_axis] += numel
        if _is_matrix(entry):
            matrices[entry.rule.has_expert_axis] += numel
        if is_frozen(entry.rule.key, vision):
            frozen += numel
    return Parameters(counts[False], counts[True], frozen, (matrices[False], matrices[True]))


@lru_cache(maxsize=1024)
def _count_stages(encoded: str, vision: str) -> tuple[Parameters, ...]:
    """Return the parameters of the ranks of each stage.

    A search for a plan that fits asks for a layout again with less recomputation, or with smaller
    micro-batches, so the answers are kept.
    """
    recorded = RecordedLayouts.decode(encoded)
    layout, sizes = recorded.find_trained(), recorded.trainer
    return tuple(count_parameters(layout, sizes, stage, vision) for stage in range(sizes.pp))


def _is_matrix(entry: Entry) -> bool:
    """Return whether Muon updates a parameter, as train/muon.py's function of this name."""
    shape = entry.shape[1:] if entry.rule.stacked else entry.shape
    return (
        len(shape) == 2
        and min(shape) > 1
        and not any(part in entry.rule.key for part in _NO_MATRICES)
    )


def _count_rounded(layout: Layout, rank: int, precision: Precision) -> int:
    """Count the bytes of a trainer rank's matrices that are rounded while a pass runs."""
    return sum(
        box.numel * itemsize(dtype)
        for box, dtype in list_boxes(layout, rank)
        if is_rounded(precision, box.name)
    )


def predict_memory(
    run: PlannedRun, side: Side | None = None, sync: SyncMemory | None = None
) -> list[RankMemory]:
    """One entry per kind of rank, of one side or of all.

    sync   what links take; None: it is counted, by a plan of them, which takes longest of all

    Raises ValueError as MegatronLayout and SGLangLayout do.
    """
    ranks: list[RankMemory] = []
    if side != "critic":
        sync = sync or SyncMemory.count(run)
    if side in (None, "trainer"):
        ranks += _predict_trainer_gpus(run, sync)
    critic = run.critic
    if side in (None, "critic") and critic is not None and not critic.colocated:
        ranks += _list_own_gpus("critic", predict_critic(run), critic.parallel)
    if side in (None, "engine") and not run.cluster.colocated:
        ranks += _list_engine_ranks(predict_engine(run, sync))
    return ranks


def _predict_trainer_gpus(run: PlannedRun, sync: SyncMemory | None) -> Iterable[RankMemory]:
    parallel = run.parallel
    trainer = predict_trainer(run, sync)
    critic = predict_critic(run) if run.critic is not None and run.critic.colocated else []
    engines = predict_engine(run, sync) if run.cluster.colocated else []
    served = {
        role: count_served_bytes(model) for role, model in run.served.items() if model.is_colocated
    }
    if critic or engines or served:
        is_sent = run.rollout.quantization == "none"
        parts = (trainer, critic, engines, served)
        return find_peaks(parallel, run.cluster.offload, *parts, sends_rounded=is_sent)
    return _list_own_gpus("trainer", trainer, parallel)


def predict_trainer(run: PlannedRun, sync: SyncMemory | None = None) -> list[Uses]:
    """Bytes per purpose of a trainer rank of each pipeline stage; see predict_memory."""
    stages = _predict_training(
        run.models.policy.choose_trained(run.train.mtp_loss).config,
        run.dtype,
        run.parallel,
        run.train,
        plan=run.plan,
    )
    sync = sync or SyncMemory.count(run)
    packed = _count_packed(run)
    for stage, uses in enumerate(stages):
        uses["sync buffers"] = sync.buffer_bytes
        if packed:
            uses[SENT_EXPERTS] = packed[stage]
        if sync.sender_pairs:
            uses["sync communicators"] = count_pair_bytes(sync.sender_pairs)
    return stages


def _count_packed(run: PlannedRun) -> list[int]:
    """Count by stage the bytes of a rank's experts in INT4, which it has while it sends them.

    [] if it sends none, or has the memory of a train step for them.
    """
    if run.rollout.quantization != "int4" or not run.cluster.colocated:
        return []
    policy = run.models.policy
    recorded = record_layouts(policy, run.dtype, run.parallel, SGLangSizes(), quantization="int4")
    source, sizes = recorded.source(), recorded.trainer
    boxes = (list_boxes(source, stage * sizes.stage_ranks) for stage in range(sizes.pp))
    return [sum(b.numel * itemsize(d) for b, d in held if split_part(b.name)) for held in boxes]


def predict_critic(run: PlannedRun) -> list[Uses]:
    """Bytes per purpose of a critic rank of each pipeline stage; the recipe has a critic."""
    critic, model = run.critic, run.models.critic
    assert critic is not None and model is not None, "the run has no critic"
    return _predict_training(
        add_value_head(model.config),
        run.dtype,
        critic.parallel,
        replace(make_critic_training(run.train, critic), optimizer=critic.optimizer),
        plan=run.plan,
    )


def _predict_training(
    hf_config: HfConfig,
    dtype: str,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    plan: PlanConfig,
) -> list[Uses]:
    """Return the bytes per purpose of a rank of each pipeline stage of a model in training.

    plan   what is assumed of experts' load and of images
    """
    sizes = MegatronSizes.from_config(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, dtype)
    step = _make_pass(dtype, parallel, train, plan)
    activations = Activations(hf_config, step)
    per_parameter = _count_parameter_bytes(dtype, train.optimizer.megatron, train.ddp)
    recorded = RecordedLayouts(hf_config, dtype, sizes, SGLangSizes())
    stages = []
    for stage, count in enumerate(_count_stages(recorded.encode(), train.vision)):
        states = (parallel, sizes, per_parameter, train.optimizer.name)
        if train.lora.rank:
            adapter = count_adapter(hf_config, layout, sizes, stage, train.lora)
            uses = _count_adapted(count, adapter, itemsize(dtype), *states)
        else:
            uses = _count_states(count, *states)
        if train.fake_quantization != "none":
            first_rank = stage * sizes.stage_ranks
            uses[UNROUNDED] = _count_rounded(layout, first_rank, train.fake_quantization)
        runs = layout.stage_layers(stage)
        uses["activations"] = _count_passes(activations, parallel, runs, stage)
        in_flight = _count_in_flight(parallel, stage) / len(runs)
        if features := count_received_features(hf_config, step, runs, in_flight):
            uses["tower's features"] = features
        if stage == 0 and family_of(hf_config).has_tower:
            uses["tower's activations"] = count_tower_activations(
                hf_config, step, train.vision, in_flight
            )
            uses["pixels"] = in_flight * count_pixel_bytes(hf_config, step.image_tokens)
        if stage == parallel.pp - 1 and not has_value_head(hf_config):
            uses["logits and log-probs"] = activations.count_logits(sizes.padded_vocab)
            if train.mtp_loss:
                uses["drafts"] = activations.count_drafts(sizes.padded_vocab, parallel.pp)
        stages.append(uses)
    return stages


def _count_parameter_bytes(dtype: str, optimizer: Passed, ddp: Passed) -> Uses:
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


def _count_states(
    count: Parameters,
    parallel: ParallelConfig,
    sizes: MegatronSizes,
    per_parameter: Uses,
    optimizer: str,
) -> Uses:
    """Weights, gradients and share of the optimizer of one rank with `count` parameters.

    Of a matrix, Muon keeps one moment where Adam keeps two; Lion keeps one of every parameter.
    """
    replicas = parallel.dp_size * parallel.cp
    expert_replicas = sizes.stage_ranks // (parallel.ep * parallel.etp)
    shared = (count.dense - count.frozen) / replicas + count.expert / expert_replicas
    dense, expert = count.matrices
    without_second = {
        "adam": 0.0,
        "muon": dense / replicas + expert / expert_replicas,
        "lion": shared,
    }
    return {
        "weights": count.total * per_parameter["weights"],
        "gradients": (count.total - count.frozen) * per_parameter["gradients"],
        "optimizer": shared * per_parameter["optimizer"] - without_second[optimizer] * FLOAT32,
    }


def _count_adapted(
    count: Parameters,
    adapter: AdapterSize,
    size: int,
    parallel: ParallelConfig,
    sizes: MegatronSizes,
    per_parameter: Uses,
    optimizer: str,
) -> Uses:
    """Weights, gradients and share of the optimizer of a rank that trains factors and a value head.

    size   bytes of a number of the model's dtype; a gradient of weights is of that dtype until it
           becomes that of the factors
    """
    trained = Parameters(adapter.dense + adapter.head, adapter.expert)
    uses = _count_states(trained, parallel, sizes, per_parameter, optimizer)
    uses["weights"] += (count.total - adapter.head) * size
    uses["gradients"] += adapter.layer * size
    return uses


def _count_passes(
    activations: Activations, parallel: ParallelConfig, runs: Sequence[range], stage: int
) -> float:
    """Bytes of activations of a stage. `runs`: the layers of each of its model chunks."""
    layers = [layer for run in runs for layer in run]
    in_flight = _count_in_flight(parallel, stage) / len(runs)
    kept = in_flight * sum(activations.count_kept(layer) for layer in layers)
    return kept + max(activations.count_working(layer) for layer in layers)


def _make_pass(dtype: str, parallel: ParallelConfig, train: TrainConfig, plan: PlanConfig) -> Pass:
    return Pass(
        tokens=train.max_tokens_per_microbatch,
        tp=parallel.tp,
        cp=parallel.cp,
        etp=parallel.etp,
        itemsize=itemsize(dtype),
        recomputed=train.recomputed,
        logprob_chunk=train.logprob_chunk,
        expert_load=plan.expert_load,
        image_share=plan.image_share,
        sparse_kernel=train.megatron.get("dsa_kernel_backend", "none") != "none",
        trains_indexers=train.indexer_loss > 0,
    )


def _count_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Forward passes a stage makes before its first backward pass (1F1B).

    They are counted by model chunk, as in megatron-core's schedules, interleaved or not
    (get_pp_rank_microbatches).
    """
    behind = parallel.pp - stage - 1
    if parallel.vpp is None:
        return behind + 1
    return 2 * behind + (parallel.vpp - 1) * parallel.pp + 1


def _list_own_gpus(
    side: Side, stages: list[Uses], parallel: ParallelConfig
) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        yield RankMemory(side, name_stage(side, stage, len(stages), parallel), "train step", uses)


def _list_engine_ranks(stages: list[Uses]) -> Iterable[RankMemory]:
    for stage, uses in enumerate(stages):
        which = f" of stage {stage}" if len(stages) > 1 else ""
        yield RankMemory("engine", f"engine ranks{which}", "weight sync", uses)
