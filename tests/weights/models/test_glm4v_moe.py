"""GLM-4.5V's table names every tensor of a published layout, and refuses what it cannot carry."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.glm4_minimax import GLM4V_MOE, make_glm4v_options, read_glm4v_sizes
from tests.support.tiny_glm4v import write_glm4v_model


@pytest.mark.parametrize("bias", [False, True])
def test_the_table_is_what_transformers_saves(tmp_path: Path, bias: bool) -> None:
    config = read_hf_config(write_glm4v_model(tmp_path, vision={"attention_bias": bias}))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert GLM4V_MOE.shapes(config) == saved
    assert any(name.endswith("attn.qkv.bias") for name in saved) == bias
    assert GLM4V_MOE.embedding == "model.language_model.embed_tokens.weight"


def test_half_of_each_head_is_rotated_by_three_axes(tmp_path: Path) -> None:
    config = read_hf_config(write_glm4v_model(tmp_path))
    assert GLM4V_MOE.rotary_share(config) == 0.5
    assert make_glm4v_options(config)["mrope_section"] == [2, 3, 3]
    assert read_glm4v_sizes(config)["tower_positions"] == 25
    assert read_glm4v_sizes(config)["tower_block_ffn"] == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}, "rotated .* 8"),
        ({"rope_parameters": {"rope_type": "default"}}, "lack 'mrope_section'"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"n_group": 4, "topk_group": 2}, "num_experts_per_tok=2 and topk_group=2"),
        ({"hidden_size": 128}, "out_hidden_size=64 is not hidden_size=128"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = read_hf_config(write_glm4v_model(tmp_path))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**config, **change})
