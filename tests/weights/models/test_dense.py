"""Dense families: norms, biases and the rotary embedding of Llama 3."""

from typing import Any

import pytest

from mcore_rl.weights.models.qwen_llama_mixtral import LLAMA, LLAMA3_ROPE, QWEN2, QWEN3
from mcore_rl.weights.models.table import Family
from tests.support.layout_strategies import GROUPED
from tests.support.megatron_layout import model_config

CONFIG = model_config(**GROUPED, head_dim=2, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("family", "qk_norm", "qkv_bias"),
    [(QWEN3, True, False), (QWEN2, False, True), (LLAMA, False, False)],
)
def test_norms_and_biases_of_queries_and_keys(
    family: Family, qk_norm: bool, qkv_bias: bool
) -> None:
    names = family.shapes(CONFIG)
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == qk_norm
    assert ("model.layers.0.self_attn.v_proj.bias" in names) == qkv_bias
    options = family.options(CONFIG)
    assert (options["qk_layernorm"], options["add_qkv_bias"]) == (qk_norm, qkv_bias)
    assert not any(family.is_moe_layer(CONFIG, layer) for layer in range(3))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}


@pytest.mark.parametrize(
    ("rope", "refusal"),
    [
        (LLAMA3, ""),
        (LLAMA3 | {"factor": 32.0}, ""),
        (LLAMA3 | {"high_freq_factor": 2.0}, "high_freq_factor=2.0: Megatron has 4.0 built in"),
        ({"rope_type": "default"}, ""),
    ],
)
def test_other_constants_of_llama_3_than_megatrons_are_refused(
    rope: dict[str, Any], refusal: str
) -> None:
    assert LLAMA.refusal({"rope_parameters": rope}).endswith(refusal)
    assert bool(LLAMA.refusal({"rope_parameters": rope})) == bool(refusal)
