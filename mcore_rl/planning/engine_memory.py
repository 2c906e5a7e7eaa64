"""Predicts the bytes of GPU memory that the ranks of an engine take, by pipeline stage.

config.json, sizes of an engine --> weights and layers of each stage, found once
                                     + KV cache, states, buffers, graphs of the recipe
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mcore_rl.config import RolloutConfig, ServedModelConfig
from mcore_rl.planning.activations import FLOAT32
from mcore_rl.planning.adapter_memory import count_on_engine
from mcore_rl.planning.deployment import (
    choose_served,
    count_engine_links,
    does_relay,
    record_layouts,
)
from mcore_rl.planning.peak_memory import Uses
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import (
    SyncMemory,
    count_graph_bytes,
    count_pair_bytes,
    count_sync_buffers,
)
from mcore_rl.rollout.engine_spec import STATES_PER_REQUEST
from mcore_rl.weight_sync.buckets import bound_message_bytes
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models.mtp import APART


@dataclass(frozen=True)
class EngineStage:
    """Layers and weights of the ranks of a pipeline stage, which follow from model and sizes alone.

    Of several ranks the first one stands for all.
    """

    first_rank: int
    layers: frozenset[int]
    weights_bytes: int


def list_stages(recorded: RecordedLayouts) -> tuple[EngineStage, ...]:
    """Return the stages of an engine. Raises ValueError if its sizes do not divide the model.

    Plans of many layouts of the trainer ask for the same engines, so the answers are kept.
    """
    alone = MegatronSizes(padded_vocab=1)  # an engine is the same whatever the trainer's layout
    return _find_stages(replace(recorded, trainer=alone).encode())


@lru_cache(maxsize=64)
def _find_stages(encoded: str) -> tuple[EngineStage, ...]:
    recorded = RecordedLayouts.decode(encoded)
    target = recorded.target()
    firsts = range(0, recorded.engines.engine_ranks, recorded.engines.tp)
    return tuple(
        EngineStage(rank, frozenset(_find_layers(target, rank)), _count_bytes(target, rank))
        for rank in firsts
    )


def predict_engine(run: PlannedRun, sync: SyncMemory | None = None) -> list[Uses]:
    """Bytes per purpose of a rank of each of an engine's pipeline stages; see predict_memory."""
    rollout = run.rollout
    one_engine = replace(SGLangSizes.from_config(rollout), engines=1)
    policy = choose_served(run.models.policy, rollout)
    recorded = record_layouts(
        policy, run.dtype, run.parallel, one_engine, quantization=rollout.quantization
    )
    target = recorded.target() if run.train.lora.rank else None
    attention_tp = rollout.tp // rollout.attention_dp
    size = itemsize(run.dtype)
    is_fp8 = str(rollout.sglang.get("kv_cache_dtype", "auto")).startswith("fp8")
    kv_size = 1 if is_fp8 else size
    num_links = count_engine_links(rollout.engines, does_relay(run.sync, rollout, run.cluster))
    buffers = num_links * count_sync_buffers(run.sync)
    if run.sync.verify == "destination":
        buffers += bound_message_bytes(int(run.sync.bucket_mib * 2**20))
    pairs = count_pair_bytes((sync or SyncMemory.count(run)).receiver_pairs)
    stages = []
    for stage in list_stages(recorded):
        kinds = _count_kinds(policy, stage.layers)
        num_linear = kinds["linear"]
        weights = stage.weights_bytes
        derived = len(stage.layers) * _count_derived(policy.sizes, attention_tp) * size
        kv_bytes = kinds["softmax"] * _count_kv(policy.sizes, attention_tp) * kv_size
        uses: Uses = {
            "weights": weights + derived,
            "KV cache": rollout.kv_cache_len * kv_bytes,
            "sync buffers": buffers,
            "CUDA graphs": count_graph_bytes(rollout),
        }
        if "index_topk" in policy.sizes:
            keys = rollout.kv_cache_len * kinds["indexed"]
            uses["index keys"] = keys * _count_index_bytes(policy.sizes)
        if pairs:
            uses["sync communicators"] = pairs
        if num_linear:
            state = _count_state_bytes(policy.sizes, attention_tp, size)
            states = _count_slots(rollout) + _count_draft_states(rollout)
            uses["linear attention"] = states * num_linear * state
        if rollout.stage_weights:
            uses["staged weights"] = weights
        if target is not None:
            uses |= count_on_engine(run, target, stage.first_rank)
        stages.append(uses)
    return stages


def count_served_bytes(model: ServedModelConfig) -> float:
    """Bytes of weights per rank, by the size of the model's files; its KV cache is not counted."""
    files = Path(model.path).glob("*.safetensors")
    return sum(path.stat().st_size for path in files) / model.engine_ranks


def _count_bytes(layout: Layout, rank: int) -> int:
    return sum(box.numel * itemsize(dtype) for box, dtype in list_boxes(layout, rank))


def _count_kinds(policy: ModelFacts, layers: Iterable[int]) -> Counter[str]:
    """Return how many layers have each kind of part; those behind the model's only attend."""
    num_layers = policy.sizes["layers"]
    kinds: Counter[str] = Counter()
    for layer in layers:
        is_draft = not 0 <= layer < num_layers
        kinds.update(["softmax"] if is_draft else policy.family.list_kinds(policy.config, layer))
    return kinds


def _find_layers(layout: Layout, rank: int) -> set[int]:
    """Return the layers with a tensor on the rank; a layer that is named apart is -1."""
    layers = set()
    for name in layout.names(rank):
        if name.startswith(APART):
            layers.add(-1)
        elif ".layers." in name:
            layers.add(int(name.partition(".layers.")[2].partition(".")[0]))
    return layers


def _count_slots(rollout: RolloutConfig) -> int:
    """Count the states of linear attention on a rank; one more stands for requests that pad."""
    given = rollout.sglang.get("max_mamba_cache_size")
    states = STATES_PER_REQUEST * rollout.max_concurrency if given is None else int(given)
    return states // rollout.attention_dp + 1


def _count_draft_states(rollout: RolloutConfig) -> int:
    """Count the states that SGLang keeps behind each draft of a request, and behind what was drawn.

    On a GPU the inputs of convolutions take less, as those behind several drafts overlap.
    """
    if rollout.speculate == "none":
        return 0
    return (rollout.max_concurrency + 1) * (rollout.speculate_tokens + 1)


def _count_state_bytes(sizes: Mapping[str, int], attention_tp: int, itemsize: int) -> int:
    """Bytes of a state of a gated delta net or a Mamba-2 layer on one rank.

    They are the last inputs of the convolution, and a matrix of each head, in float32.
    """
    if "mamba_in" in sizes:
        inputs = sizes["mamba_conv"] * (sizes["mamba_kernel"] - 1) * itemsize
        matrices = sizes["mamba_inner"] * sizes["mamba_state"] // sizes["mamba_groups"]
    else:
        inputs = sizes["delta_qkv"] * (sizes["delta_kernel"] - 1) * itemsize
        matrices = sizes["delta_values"] * sizes["delta_keys"] // sizes["delta_key_heads"]
    return (inputs + matrices * FLOAT32) // attention_tp


def _count_derived(sizes: Mapping[str, int], attention_tp: int) -> int:
    """Numbers per layer of the two matrices that SGLang makes of kv_b_proj (latent attention)."""
    if "kv_rank" not in sizes:
        return 0
    return sizes["kv_up"] * sizes["kv_rank"] // attention_tp


def _count_kv(sizes: Mapping[str, int], attention_tp: int) -> int:
    """Numbers of the KV cache per token and layer on one rank."""
    if "kv_rank" in sizes:
        return sizes["kv_down"]
    return 2 * max(sizes["kv_heads"] // attention_tp, 1) * sizes["head"]


def _count_index_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of a key of an indexer, which SGLang keeps in FP8 with a scale of 128 values."""
    return sizes["index_head"] + sizes["index_head"] // 128 * FLOAT32
