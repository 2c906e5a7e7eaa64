"""Megatron's tensors of a small Qwen3-MoE, built from HF tensors by plain torch and cut up.

The oracle for the family table: it shares no code with `mcore_rl.weights` but the type it fills.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.weights.layouts.training import LocalPart

Config = Mapping[str, Any]


@dataclass(frozen=True)
class TrainLayout:
    """Sizes of the parallel groups: tp * dp * pp ranks, of which etp * ep share the experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    layer_axis: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp


@dataclass(frozen=True)
class Rank:
    """One training rank: parts as Megatron describes them, and the tensors that they describe."""

    parts: list[LocalPart]
    tensors: dict[str, Tensor]


def model_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny model, one dense layer among its three."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "intermediate_size": 8,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    } | changes


def hf_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """int64 tensors in which no two elements, of any two tensors, are equal."""
    weights, first = {}, 1
    for name, shape in shapes.items():
        numel = int(torch.Size(shape).numel())
        weights[name] = torch.arange(first, first + numel).reshape(shape)
        first += numel
    return weights


def train_ranks(config: Config, weights: Mapping[str, Tensor], layout: TrainLayout) -> list[Rank]:
    """Every rank of a training job in this layout, holding `weights`."""
    return [_rank(config, weights, layout, rank) for rank in range(layout.world_size)]


def _rank(config: Config, weights: Mapping[str, Tensor], layout: TrainLayout, rank: int) -> Rank:
    stage, in_stage = divmod(rank, layout.tp * layout.dp)
    tp, etp, ep = in_stage % layout.tp, in_stage % layout.etp, in_stage // layout.etp % layout.ep
    num_chunks = layout.pp * layout.vpp
    num_layers = config["num_hidden_layers"]
    result = Rank([], {})
    for v in range(layout.vpp):
        chunk = v * layout.pp + stage
        layers = range(num_layers * chunk // num_chunks, num_layers * (chunk + 1) // num_chunks)
        pieces = list(
            _model_pieces(config, weights, layout, tp, chunk == 0, chunk == num_chunks - 1)
        )
        for layer in layers:
            pieces += _layer_pieces(config, weights, layout, layer, tp, etp, ep)
        for piece in pieces:
            piece.add_to(result, f"{v}.")
    return result


@dataclass(frozen=True)
class _Piece:
    """A local parameter: halves of it (gate and up) are separate parts of the global tensor."""

    key: str
    name: str
    global_shape: tuple[int, ...]
    lead: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    halves: tuple[Tensor, ...]

    def add_to(self, rank: Rank, prefix: str) -> None:
        name, offset = prefix + self.name, 0
        rank.tensors[name] = torch.cat(self.halves).clone()
        for start, half in zip(self.offsets, self.halves, strict=True):
            rank.parts.append(
                LocalPart(
                    self.key,
                    self.global_shape,
                    (*self.lead, *start),
                    (1,) * len(self.lead) + tuple(half.shape),
                    name,
                    "int64",
                    offset,
                )
            )
            offset += half.numel()


def _model_pieces(
    config: Config,
    weights: Mapping[str, Tensor],
    layout: TrainLayout,
    tp: int,
    first: bool,
    last: bool,
) -> Iterator[_Piece]:
    embed = _pad_rows(weights["model.embed_tokens.weight"], 4 * layout.tp)
    tied = config["tie_word_embeddings"]
    if first:
        yield _split("embedding.word_embeddings.weight", embed, 0, tp, layout.tp)
    if last:
        yield _split("decoder.final_layernorm.weight", weights["model.norm.weight"], None, 0, 1)
    if last and not tied:
        head = _pad_rows(weights["lm_head.weight"], 4 * layout.tp)
        yield _split("output_layer.weight", head, 0, tp, layout.tp)
    if last and tied and not first:
        yield _split(
            "embedding.word_embeddings.weight", embed, 0, tp, layout.tp, name="output_layer.weight"
        )


def _layer_pieces(
    config: Config,
    weights: Mapping[str, Tensor],
    layout: TrainLayout,
    layer: int,
    tp: int,
    etp: int,
    ep: int,
) -> Iterator[_Piece]:
    def hf(name: str) -> Tensor:
        return weights[f"model.layers.{layer}.{name}.weight"]

    def key(name: str) -> str:
        return f"decoder.layers.{name}" if layout.layer_axis else f"decoder.layers.{layer}.{name}"

    def lead(*more: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return (((layer, config["num_hidden_layers"]),) if layout.layer_axis else ()) + more

    def split(name: str, tensor: Tensor, axis: int | None, rank: int = 0, size: int = 1) -> _Piece:
        return _split(key(name), tensor, axis, rank, size, lead(), f"{layer}.{name}")

    groups = config["num_key_value_heads"]
    q, k, v = (hf(f"self_attn.{x}_proj").unflatten(0, (groups, -1)) for x in "qkv")
    qkv = torch.cat([q, k, v], dim=1).flatten(0, 1)
    yield split("self_attention.linear_qkv.weight", qkv, 0, tp, layout.tp)
    yield split("self_attention.linear_qkv.layer_norm_weight", hf("input_layernorm"), None)
    yield split("self_attention.q_layernorm.weight", hf("self_attn.q_norm"), None)
    yield split("self_attention.k_layernorm.weight", hf("self_attn.k_norm"), None)
    yield split("self_attention.linear_proj.weight", hf("self_attn.o_proj"), 1, tp, layout.tp)
    norm = hf("post_attention_layernorm")
    if layer in config["mlp_only_layers"]:
        yield split("mlp.linear_fc1.layer_norm_weight", norm, None)
        gate, up = hf("mlp.gate_proj"), hf("mlp.up_proj")
        yield _gated(key("mlp.linear_fc1.weight"), gate, up, tp, layout.tp, lead(), f"{layer}.fc1")
        yield split("mlp.linear_fc2.weight", hf("mlp.down_proj"), 1, tp, layout.tp)
        return
    yield split("pre_mlp_layernorm.weight", norm, None)
    yield split("mlp.router.weight", hf("mlp.gate"), None)
    experts = config["num_experts"]
    for expert in range(experts * ep // layout.ep, experts * (ep + 1) // layout.ep):
        gate, up, down = (hf(f"mlp.experts.{expert}.{x}_proj") for x in ("gate", "up", "down"))
        fc1, fc2 = (
            key("mlp.experts.experts.linear_fc1.weight"),
            key("mlp.experts.experts.linear_fc2.weight"),
        )
        axes = lead((expert, experts))
        yield _gated(fc1, gate, up, etp, layout.etp, axes, f"{layer}.{expert}.fc1")
        yield _split(fc2, down, 1, etp, layout.etp, axes, f"{layer}.{expert}.fc2")


def _split(
    key: str,
    tensor: Tensor,
    axis: int | None,
    rank: int,
    size: int,
    lead: tuple[tuple[int, int], ...] = (),
    name: str | None = None,
) -> _Piece:
    start = [0] * tensor.dim()
    local = tensor
    if axis is not None:
        local = tensor.chunk(size, axis)[rank].contiguous()
        start[axis] = rank * local.shape[axis]
    shape = (*(n for _, n in lead), *tensor.shape)
    return _Piece(key, name or key, shape, tuple(i for i, _ in lead), (tuple(start),), (local,))


def _gated(
    key: str,
    gate: Tensor,
    up: Tensor,
    rank: int,
    size: int,
    lead: tuple[tuple[int, int], ...],
    name: str,
) -> _Piece:
    halves = tuple(half.chunk(size)[rank] for half in (gate, up))
    rows = len(halves[0])
    starts = ((rank * rows, 0), (len(gate) + rank * rows, 0))
    shape = (*(n for _, n in lead), 2 * len(gate), gate.shape[1])
    return _Piece(key, name, shape, tuple(i for i, _ in lead), starts, halves)


def _pad_rows(tensor: Tensor, multiple: int) -> Tensor:
    padding = -len(tensor) % multiple
    return torch.cat([tensor, torch.zeros(padding, tensor.shape[1], dtype=tensor.dtype)])
