"""Reads off SGLang's modules what native/forward.c needs to know of a decoder.

Takes a loaded model, returns its `Decoder`, or says why its layers must run in torch.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer"}
"""Classes whose forward pass is that of native/forward.c."""
_DENSE = {"LlamaMLP", "Qwen2MLP"}
_SPARSE = {"Qwen3MoeSparseMoeBlock"}
_NORMS = {"RMSNorm"}
_LINEAR = {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear"}


class UnsupportedError(Exception):
    """A model, or a part of it, that native/forward.c does not compute."""


class Shape(ctypes.Structure):
    """shape_t of native/forward.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("rotary_dim", "slot_stride", "table_stride")),
        ("threads", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


WEIGHTS = (
    "attention_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "out",
    "mlp_norm",
    "router",
    "gate_up",
    "down",
)


class Layer(ctypes.Structure):
    """layer_t of native/forward.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*WEIGHTS, "k_cache", "v_cache")),
        *((name, ctypes.c_int64) for name in ("experts", "top_k", "normalize", "intermediate")),
        ("chosen", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Weight:
    """A parameter of a module, looked up at every use, as a weight update may replace it."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None, f"{type(self.module).__name__} has no {self.name}"
        return parameter


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer by their names in layer_t, and the sizes of its feed-forward part.

    A dense layer has 0 experts.
    """

    weights: dict[str, Weight]
    experts: int
    top_k: int
    normalize: bool
    intermediate: int


@dataclass(frozen=True)
class Decoder:
    """A model that native/forward.c computes. cos_sin is [positions, rotary_dim]."""

    shape: Shape
    layers: tuple[DecoderLayer, ...]
    embedding: Weight
    final_norm: Weight
    cos_sin: Tensor

    def weights(self) -> Iterator[Weight]:
        yield self.embedding
        yield self.final_norm
        for layer in self.layers:
            yield from layer.weights.values()


def read_decoder(model: Any) -> Decoder:
    """Return the decoder within an SGLang model; UnsupportedError says what is not supported."""
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if inner is None or layers is None or not len(layers):
        raise UnsupportedError(f"{type(model).__name__} has no model.layers")
    first = layers[0]
    read = tuple(_read_layer(layer) for layer in layers)
    if len({_head_shape(layer.self_attn) for layer in layers}) > 1:
        raise UnsupportedError("layers of different attention")
    rotary = first.self_attn.rotary_emb
    decoder = Decoder(
        _shape(inner, first),
        read,
        _weight(inner.embed_tokens, {"VocabParallelEmbedding"}),
        _weight(inner.norm, _NORMS),
        rotary.cos_sin_cache,
    )
    for weight in decoder.weights():
        tensor = weight.tensor
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise UnsupportedError(f"{weight.name} of dtype {tensor.dtype}")
    if decoder.cos_sin.dtype != torch.float32 or not decoder.cos_sin.is_contiguous():
        raise UnsupportedError("a rotary table that is not float32")
    return decoder


def _shape(inner: Any, layer: Any) -> Shape:
    attention = layer.self_attn
    heads, kv_heads, head_dim, scale = _head_shape(attention)
    eps = {module.variance_epsilon for module in inner.modules() if type(module).__name__ in _NORMS}
    if len(eps) > 1:
        raise UnsupportedError(f"norms of different epsilon: {sorted(eps)}")
    rotary = attention.rotary_emb
    return Shape(
        hidden=inner.embed_tokens.weight.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary.rotary_dim,
        eps=eps.pop(),
        scale=scale,
    )


def _head_shape(attention: Any) -> tuple[int, int, int, float]:
    attn = attention.attn
    return attn.tp_q_head_num, attn.tp_k_head_num, attn.head_dim, attn.scaling


def _read_layer(layer: Any) -> DecoderLayer:
    if type(layer).__name__ not in _LAYERS:
        raise UnsupportedError(f"layers of class {type(layer).__name__}")
    attention = layer.self_attn
    _check_attention(attention)
    weights = {
        "attention_norm": _weight(layer.input_layernorm, _NORMS),
        "qkv": _weight(attention.qkv_proj, _LINEAR),
        "out": _weight(attention.o_proj, _LINEAR),
        "mlp_norm": _weight(layer.post_attention_layernorm, _NORMS),
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            weights[name] = _weight(getattr(attention, name), _NORMS)
    if attention.qkv_proj.bias is not None:
        weights["qkv_bias"] = Weight(attention.qkv_proj, "bias")
    if attention.o_proj.bias is not None:
        raise UnsupportedError("an output projection with bias")
    return _read_mlp(layer.mlp, weights)


def _check_attention(attention: Any) -> None:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    attn, rotary = attention.attn, attention.rotary_emb
    if attn.sliding_window_size > -1 or attn.logit_cap or attn.v_head_dim != attn.head_dim:
        raise UnsupportedError("attention with windows, caps or other value heads")
    is_plain = type(rotary).forward_native is RotaryEmbedding.forward_native
    if not is_plain or not rotary.is_neox_style:
        raise UnsupportedError(f"rotary embeddings of class {type(rotary).__name__}")


def _read_mlp(mlp: Any, weights: dict[str, Weight]) -> DecoderLayer:
    kind = type(mlp).__name__
    if kind in _DENSE:
        weights["gate_up"] = _weight(mlp.gate_up_proj, _LINEAR)
        weights["down"] = _weight(mlp.down_proj, _LINEAR)
        if mlp.gate_up_proj.bias is not None or mlp.down_proj.bias is not None:
            raise UnsupportedError("feed-forward layers with bias")
        return DecoderLayer(weights, 0, 1, False, mlp.down_proj.weight.shape[1])
    if kind not in _SPARSE:
        raise UnsupportedError(f"feed-forward layers of class {kind}")
    config, experts = mlp.topk.topk_config, mlp.experts
    is_plain = (
        config.scoring_func == "softmax"
        and not config.use_grouped_topk
        and config.correction_bias is None
        and config.custom_routing_function is None
        and config.routed_scaling_factor in (None, 1.0)
        and not config.num_shared_topk_slots
        and not getattr(experts.quant_method, "w13_swiglu_interleaved", False)
        and getattr(experts, "scheme", None) is None  # it is that of quantized weights
        and getattr(experts, "w13_weight_bias", None) is None
        and experts.moe_runner_config.activation == "silu"
        and experts.moe_runner_config.gemm1_alpha is None
    )
    if not is_plain or mlp.gate.bias is not None:
        raise UnsupportedError("a router or experts of another form")
    weights["router"] = _weight(mlp.gate, {"ReplicatedLinear"})
    weights["gate_up"] = Weight(experts, "w13_weight")
    weights["down"] = Weight(experts, "w2_weight")
    num_experts, _, intermediate = experts.w2_weight.shape
    return DecoderLayer(weights, num_experts, config.top_k, config.renormalize, intermediate)


def _weight(module: nn.Module, kinds: set[str]) -> Weight:
    if type(module).__name__ not in kinds:
        raise UnsupportedError(f"a layer of class {type(module).__name__}")
    method = getattr(module, "quant_method", None)
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        raise UnsupportedError(f"weights of {type(method).__name__}")
    return Weight(module, "weight")
