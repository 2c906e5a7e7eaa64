"""Random Qwen3-MoE models of a wanted size, cut as Megatron cuts them: TP = EP = all ranks."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.slices.layouts.training import LocalPart

DTYPE = torch.float32
LAYER = "decoder.layers."
EXPERTS = LAYER + "mlp.experts.experts."
SHAPES = {
    "small": {"hidden": 256, "ffn": 64, "experts": 128},
    "large": {"hidden": 1024, "ffn": 512, "experts": 8},
}
"""Expert matrices of 64 KiB and of 2 MiB."""


@dataclass(frozen=True)
class Case:
    """About `mib` of float32 weights, most of them in expert matrices of the `kind` of SHAPES."""

    mib: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.mib} MiB {self.kind}"

    def config(self) -> dict[str, Any]:
        sizes = SHAPES[self.kind]
        hidden, ffn, experts = sizes["hidden"], sizes["ffn"], sizes["experts"]
        layer_bytes = DTYPE.itemsize * hidden * (3 * ffn * experts + 3 * hidden)
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 1024,
            "hidden_size": hidden,
            "num_hidden_layers": max(1, round(self.mib * 2**20 / layer_bytes)),
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "head_dim": 64,
            "intermediate_size": hidden,
            "moe_intermediate_size": ffn,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "float32",
        }


def write_config(case: Case, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config()))
    return folder


@dataclass(frozen=True)
class LocalTensor:
    """One parameter of one rank; `is_sharded`: other ranks hold other parts of the Megatron tensor."""

    part: LocalPart
    is_sharded: bool

    def make(self) -> Tensor:
        """Equal wherever the same part is held."""
        shape = [n for n in self.part.local_shape if n > 1]
        seed = zlib.crc32(f"{self.part.key} {self.part.global_offset}".encode())
        return torch.empty(shape, dtype=DTYPE).uniform_(
            -0.1, 0.1, generator=torch.Generator().manual_seed(seed)
        )


def local_tensors(config: dict[str, Any], rank: int, world_size: int) -> list[LocalTensor]:
    """What trainer rank `rank` holds; the lists of all ranks go through the model in the same order."""
    return list(_tensors(config, rank, world_size))


def _tensors(config: dict[str, Any], rank: int, world_size: int) -> Iterator[LocalTensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head, ffn = config["head_dim"], config["moe_intermediate_size"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layers, experts = config["num_hidden_layers"], config["num_experts"]

    def cut(
        key: str, shape: tuple[int, ...], axis: int | None, layer: int | None = None
    ) -> LocalTensor:
        start, local = [0] * len(shape), list(shape)
        if axis is not None:
            local[axis] //= world_size
            start[axis] = rank * local[axis]
        lead, at, one = ((layers,), (layer,), (1,)) if layer is not None else ((), (), ())
        name = f"{layer}.{key}"
        part = LocalPart(key, (*lead, *shape), (*at, *start), (*one, *local), name, "float32")  # type: ignore[arg-type]
        return LocalTensor(part, axis is not None)

    def expert(key: str, shape: tuple[int, int], layer: int, index: int) -> LocalTensor:
        part = LocalPart(
            key,
            (layers, experts, *shape),
            (layer, index, 0, 0),
            (1, 1, *shape),
            f"{layer}.{index}.{key}",
            "float32",
        )
        return LocalTensor(part, True)

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
    """Of the whole model, each element counted once."""
    parts = {
        (t.part.key, t.part.global_offset[: len(t.part.global_shape) - 2]): t.part
        for t in _tensors(config, 0, 1)
    }
    return sum(prod(part.local_shape) for part in parts.values()) * DTYPE.itemsize
