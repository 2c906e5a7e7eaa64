"""Makes a random Qwen3-MoE model, cut as Megatron cuts it at TP = EP = all ranks."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.tasks.tiny_models import qwen3_moe_config
from mcore_rl.weight_sync.controller.sync import RecordLayouts
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.training import LocalPart

DTYPE = torch.float32
LAYER = "decoder.layers."
EXPERTS = LAYER + "mlp.experts.experts."
SHAPES = {
    "small": {"hidden": 256, "ffn": 64, "experts": 128},
    "large": {"hidden": 1024, "ffn": 512, "experts": 8},
    "tiny": {"hidden": 128, "ffn": 16, "experts": 256},
}
"""Expert matrices of 64 KiB, of 2 MiB, and of 8 KiB, as many in a layer as DeepSeek-V3 has."""


@dataclass(frozen=True)
class Case:
    """A model of about `mib` MiB of float32 weights, mostly experts of a `kind` in SHAPES."""

    mib: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.mib} MiB {self.kind}"

    def config(self) -> dict[str, Any]:
        sizes = SHAPES[self.kind]
        hidden, ffn, experts = sizes["hidden"], sizes["ffn"], sizes["experts"]
        layer_bytes = DTYPE.itemsize * hidden * (3 * ffn * experts + 3 * hidden)
        return make_config(self.kind, max(1, round(self.mib * 2**20 / layer_bytes)))


def make_config(kind: str, num_layers: int) -> dict[str, Any]:
    """Return the config.json of a model with experts of a `kind` in SHAPES."""
    sizes = SHAPES[kind]
    hidden = sizes["hidden"]
    return qwen3_moe_config(
        1024,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(2, hidden // 128),
        head_dim=64,
        intermediate_size=hidden,
        moe_intermediate_size=sizes["ffn"],
        num_experts=sizes["experts"],
        max_position_embeddings=4096,
    )


def record_layouts(config: dict[str, Any], num_ranks: int) -> RecordLayouts:
    """Return what spares the ranks listing their shards for one another, as in a run."""
    dtype = str(DTYPE).removeprefix("torch.")
    trainer = MegatronSizes(config["vocab_size"], tp=num_ranks, ep=num_ranks)
    return lambda sizes: RecordedLayouts(config, dtype, trainer, sizes)


def write_config(case: Case, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config()))
    return folder


@dataclass(frozen=True)
class LocalTensor:
    """One parameter of one rank.

    is_sharded   other ranks hold other parts of the Megatron tensor
    """

    part: LocalPart
    is_sharded: bool

    def make(self) -> Tensor:
        """Return random values that are equal on all ranks that hold the same part."""
        shape = [size for size in self.part.local_shape if size > 1]
        seed = zlib.crc32(f"{self.part.key} {self.part.global_offset}".encode())
        return torch.empty(shape, dtype=DTYPE).uniform_(
            -0.1, 0.1, generator=torch.Generator().manual_seed(seed)
        )


def local_tensors(config: dict[str, Any], rank: int, world_size: int) -> list[LocalTensor]:
    """Return the parameters of trainer rank `rank`, in an order that is the same on all ranks."""
    return list(_tensors(config, rank, world_size))


def _tensors(config: dict[str, Any], rank: int, world_size: int) -> Iterator[LocalTensor]:
    hidden = config["hidden_size"]
    vocab = config["vocab_size"]
    head = config["head_dim"]
    ffn = config["moe_intermediate_size"]
    q = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head
    layers = config["num_hidden_layers"]
    experts = config["num_experts"]

    def cut(
        key: str, shape: tuple[int, ...], axis: int | None, layer: int | None = None
    ) -> LocalTensor:
        """Cut a tensor on `axis`; `layer` is its index on a leading axis of all layers."""
        start = [0] * len(shape)
        local = list(shape)
        if axis is not None:
            local[axis] //= world_size
            start[axis] = rank * local[axis]
        whole = list(shape)
        if layer is not None:
            whole.insert(0, layers)
            start.insert(0, layer)
            local.insert(0, 1)
        name = f"{layer}.{key}"
        part = LocalPart(key, tuple(whole), tuple(start), tuple(local), name, "float32")
        return LocalTensor(part, axis is not None)

    def expert(key: str, shape: tuple[int, int], layer: int, index: int) -> LocalTensor:
        whole = (layers, experts, *shape)
        name = f"{layer}.{index}.{key}"
        start = (layer, index, 0, 0)
        return LocalTensor(LocalPart(key, whole, start, (1, 1, *shape), name, "float32"), True)

    yield cut("embedding.word_embeddings.weight", (vocab, hidden), 0)
    for layer in range(layers):
        yield cut(LAYER + "self_attention.linear_qkv.layer_norm_weight", (hidden,), None, layer)
        yield cut(LAYER + "self_attention.linear_qkv.weight", (q + 2 * kv, hidden), 0, layer)
        yield cut(LAYER + "self_attention.q_layernorm.weight", (head,), None, layer)
        yield cut(LAYER + "self_attention.k_layernorm.weight", (head,), None, layer)
        yield cut(LAYER + "self_attention.linear_proj.weight", (hidden, q), 1, layer)
        yield cut(LAYER + "pre_mlp_layernorm.weight", (hidden,), None, layer)
        yield cut(LAYER + "mlp.router.weight", (experts, hidden), None, layer)
        for index in range(rank * experts // world_size, (rank + 1) * experts // world_size):
            yield expert(EXPERTS + "linear_fc1.weight", (2 * ffn, hidden), layer, index)
            yield expert(EXPERTS + "linear_fc2.weight", (hidden, ffn), layer, index)
    yield cut("decoder.final_layernorm.weight", (hidden,), None)
    yield cut("output_layer.weight", (vocab, hidden), 0)


def num_bytes(config: dict[str, Any]) -> int:
    """Return the size of the whole model, with each element counted once."""
    numel_by_part: dict[tuple[str, tuple[int, ...]], int] = {}
    for tensor in _tensors(config, 0, 1):
        part = tensor.part
        stacked = part.global_offset[: len(part.global_shape) - 2]
        numel_by_part[part.key, stacked] = prod(part.local_shape)
    return sum(numel_by_part.values()) * DTYPE.itemsize
