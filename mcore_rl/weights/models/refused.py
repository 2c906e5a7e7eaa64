"""Architectures that are known but not supported, with the reason that the error gives."""

from collections.abc import Mapping

_GATED_DELTA_NET = "most of its layers are gated delta nets, and no table here knows their tensors"
_SPARSE_ATTENTION = (
    "its attention reads only keys that an indexer chooses, which the attention here cannot"
)

REFUSED: Mapping[str, str] = {
    "DeepseekV32ForCausalLM": _SPARSE_ATTENTION,
    "GlmMoeDsaForCausalLM": _SPARSE_ATTENTION,
    "Qwen3NextForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5MoeForCausalLM": _GATED_DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": _GATED_DELTA_NET,
    "MiniMaxForCausalLM": (
        "most of its layers have lightning attention, which Megatron does not have"
    ),
    "Llama4ForCausalLM": (
        "layers without a rotary embedding and attention in chunks, which the attention here does"
        " not have"
    ),
    "Llama4ForConditionalGeneration": "it has a vision model, and only text models are carried",
}
"""Architecture -> why it is refused."""
