"""Predicts the bytes of GPU memory that the ranks of engines take."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mcore_rl.config import Config, ServedModelConfig
from mcore_rl.planning.deployment import engine_links, engine_sizes, record_layouts, relays
from mcore_rl.planning.rank_memory import Uses
from mcore_rl.weight_sync.bucket_transfer import NUM_SLOTS
from mcore_rl.weight_sync.buckets import largest_message_bytes
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.layouts.layout import Layout, boxes_of


def sync_buffer_bytes(config: Config) -> int:
    """Bytes of the buffers at one end of a link of the weight sync, padding included."""
    return NUM_SLOTS * largest_message_bytes(int(config.sync.bucket_mib * 2**20))


def engine_uses(config: Config, policy: ModelFacts) -> list[Uses]:
    """Bytes per purpose of a rank of each of an engine's pipeline stages."""
    rollout = config.rollout
    one_engine = replace(engine_sizes(rollout), engines=1)
    target = record_layouts(config, policy, one_engine).target()
    attention_tp = rollout.tp // rollout.attention_dp
    size = itemsize(config.model.dtype)
    is_fp8 = str(rollout.sglang.get("kv_cache_dtype", "auto")).startswith("fp8")
    kv_size = 1 if is_fp8 else size
    num_links = engine_links(rollout.engines, relays(config))
    buffers = num_links * sync_buffer_bytes(config)
    if config.sync.verify == "destination":
        buffers += largest_message_bytes(int(config.sync.bucket_mib * 2**20))
    stages = []
    for stage in range(rollout.pp):
        first_rank = stage * rollout.tp
        num_layers = _num_layers(target, first_rank)
        weights = _bytes(target, first_rank)
        derived = num_layers * _derived_numbers(policy.sizes, attention_tp) * size
        kv_bytes = num_layers * _kv_numbers(policy.sizes, attention_tp) * kv_size
        uses: Uses = {
            "weights": weights + derived,
            "KV cache": rollout.kv_cache_len * kv_bytes,
            "sync buffers": buffers,
        }
        if rollout.stage_weights:
            uses["staged weights"] = weights
        stages.append(uses)
    return stages


def served_bytes(model: ServedModelConfig) -> float:
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
