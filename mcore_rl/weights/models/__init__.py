"""The supported model families, by the architecture that config.json names.

Refused are architectures that are known but not supported, and counts without end in a config.json,
which would make lists of tensors that never end.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.weights.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from mcore_rl.weights.models.glm4_minimax import GLM4_MOE, GLM4V_MOE, MINIMAX_M2
from mcore_rl.weights.models.gpt_oss import GPT_OSS
from mcore_rl.weights.models.hunyuan import HUNYUAN_V3
from mcore_rl.weights.models.moonvit import KIMI_K25, KIMI_VL
from mcore_rl.weights.models.mtp import TRAINED
from mcore_rl.weights.models.nemotron import NEMOTRON_H
from mcore_rl.weights.models.qwen_delta_net import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mcore_rl.weights.models.qwen_llama_mixtral import (
    LLAMA,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
from mcore_rl.weights.models.qwen_vl import (
    QWEN2_5_VL,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from mcore_rl.weights.models.settings import find_rope_refusal, read_rope, refuse_quantized
from mcore_rl.weights.models.sparse_attention import DEEPSEEK_V32, GLM5
from mcore_rl.weights.models.table import Family, HfConfig, Shape
from mcore_rl.weights.models.value_head import make_classifier

CAUSAL = (
    QWEN3_MOE,
    QWEN2_MOE,
    MIXTRAL,
    OLMOE,
    GLM4_MOE,
    MINIMAX_M2,
    GPT_OSS,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    GLM4_MOE_LITE,
    DEEPSEEK_V32,
    GLM5,
    HUNYUAN_V3,
    QWEN3,
    QWEN2,
    LLAMA,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    NEMOTRON_H,
)
"""The tables of causal language models."""

VISION = (
    QWEN2_5_VL,
    GLM4V_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_5_VL,
    QWEN3_5_VL_MOE,
    KIMI_VL,
    KIMI_K25,
)
"""The tables of models that see images."""

LANGUAGE = (*CAUSAL, *VISION)
"""The tables of all models that give log-probs; each has a twin with a value head."""

FAMILIES = {family.architecture: family for family in (*LANGUAGE, *map(make_classifier, LANGUAGE))}

BLOCK_SPARSE = (
    "its attention reads blocks of keys, which an indexer chooses for each key-value head; that of"
    " megatron-core 0.19 chooses single keys, and has latent attention alone"
)
HYPER_CONNECTIONS = "several residual streams that its layers mix (hyper-connections)"
CHANNEL_DECAY = "delta nets whose decay differs by channel"
NOT_IN_MEGATRON = "which megatron-core 0.19 does not have"
REFUSED: Mapping[str, str] = {
    "MiniMaxM3SparseForConditionalGeneration": BLOCK_SPARSE,
    "MiniMaxM3SparseForCausalLM": BLOCK_SPARSE,
    "DeepseekV4ForCausalLM": (
        f"it has attention to compressed keys, and {HYPER_CONNECTIONS}, {NOT_IN_MEGATRON}"
    ),
    "Glm5NextForConditionalGeneration": (
        f"it has {CHANNEL_DECAY}, and {HYPER_CONNECTIONS}, {NOT_IN_MEGATRON}"
    ),
    "HYV4ForCausalLM": (
        f"it has {HYPER_CONNECTIONS}, and sinks in sparse attention, {NOT_IN_MEGATRON}"
    ),
    "KimiLinearForCausalLM": f"it has {CHANNEL_DECAY}, {NOT_IN_MEGATRON}",
    "KimiK3ForConditionalGeneration": (
        f"it has {CHANNEL_DECAY}, and layers that attend to the outputs of earlier ones,"
        f" {NOT_IN_MEGATRON}"
    ),
    **dict.fromkeys(
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        f"it has {HYPER_CONNECTIONS}, and embeddings of n-grams in its layers, {NOT_IN_MEGATRON}",
    ),
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
    "vt_num_hidden_layers": 4096,
    "num_nextn_predict_layers": 256,
    TRAINED: 256,
    "num_experts": 16384,
    "num_local_experts": 16384,
    "n_routed_experts": 16384,
}
"""Key of config.json, or of a part of it -> the most that is believed; models have about 100 layers
and 500 experts."""
MAX_EXPERTS_IN_ALL = 1 << 20
"""Layers times experts."""


def family_of(hf_config: HfConfig) -> Family:
    """Return the family of a model.

    Raises ValueError naming the architecture if it has no family.
    """
    for architecture in hf_config.get("architectures") or ():
        if architecture in FAMILIES:
            return FAMILIES[architecture]
        if architecture in REFUSED:
            raise ValueError(
                f"architectures = [{architecture!r}] in config.json: {REFUSED[architecture]}"
            )
    raise ValueError(
        f"architectures = {hf_config.get('architectures')} in config.json is not supported; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )


def hf_tensor_shapes(hf_config: HfConfig) -> dict[str, Shape]:
    """Return HF name -> shape of every tensor of the model, from config.json alone."""
    return family_of(hf_config).shapes(hf_config)


def refuse_unsupported(hf_config: HfConfig, file: object = "config.json") -> None:
    """Refuse a model that the family's table or Megatron's layers cannot represent.

    Raises ValueError naming the setting and `file`.
    """
    refuse_counts(hf_config, file)
    family = family_of(hf_config)
    refuse_quantized(hf_config, file)
    for key, values in family.supported.items():
        if key in hf_config and hf_config[key] not in values:
            supported = " or ".join(map(repr, values))
            raise ValueError(f"{key}={hf_config[key]!r} in {file}: only {supported} is supported")
    if refusal := find_rope_refusal(hf_config):
        raise ValueError(f"{file} cannot be carried: {refusal}")
    rope_type = read_rope(hf_config)["rope_type"]
    if rope_type not in family.rope_types:
        supported = " or ".join(map(repr, family.rope_types))
        raise ValueError(f"rope_type={rope_type!r} in {file}: only {supported} is supported")
    refusal = family.refusal(hf_config)
    if refusal:
        raise ValueError(f"{file} cannot be carried: {refusal}")
    for key in family.explicit:
        if key not in hf_config:
            raise ValueError(
                f"{file} lacks {key!r}, for which {family.architecture} has a default of its own in"
                " transformers: write the value that the model has"
            )
    # Both raise ValueError for a setting that is missing.
    family.sizes(hf_config)
    family.options(hf_config)


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
