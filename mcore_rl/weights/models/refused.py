"""Refuses architectures that are known but not supported, and counts without end in a config.json.

Without a bound, such counts would make lists of tensors that never end.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.weights.models.table import HfConfig

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


MAX_COUNTS: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "depth": 4096,
    "num_nextn_predict_layers": 256,
    "num_experts": 16384,
    "num_local_experts": 16384,
    "n_routed_experts": 16384,
}
"""Key of config.json, or of a part of it -> the most that is believed; models have about 100 layers
and 500 experts."""
MAX_EXPERTS_IN_ALL = 1 << 20
"""Layers times experts."""


def refuse_counts(config: HfConfig, file: object) -> None:
    """Raise ValueError with key and `file` for a count that is too large or no whole number."""
    for part in _list_parts(config):
        for key, most in MAX_COUNTS.items():
            value = part.get(key)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise ValueError(
                    f"{key}={value!r:.40} in {file}: it must be a whole number from 0 to {most}"
                )
        layers = part.get("num_hidden_layers") or 0
        experts = max(part.get(key) or 0 for key in MAX_COUNTS if "experts" in key)
        if layers * experts > MAX_EXPERTS_IN_ALL:
            raise ValueError(
                f"{layers} layers of {experts} experts in {file}: at most {MAX_EXPERTS_IN_ALL}"
                " experts are read"
            )


def _list_parts(config: HfConfig) -> Iterator[Mapping[str, Any]]:
    """Yield config.json and its parts, such as text_config."""
    yield config
    yield from (part for part in config.values() if isinstance(part, Mapping))
