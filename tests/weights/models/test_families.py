"""The tables agree with what transformers saves, and unsupported models are refused."""

import re
from pathlib import Path

import pytest
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import (
    CAUSAL,
    FAMILIES,
    REFUSED,
    family_of,
    hf_tensor_shapes,
    refuse_unsupported,
)
from tests.support.megatron_layout import model_config
from tests.support.tiny_models import MODELS, write_model

CASES = [
    *((kind, {}) for kind in MODELS),
    ("qwen3_moe", {"tie_word_embeddings": True, "mlp_only_layers": [1]}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [2]}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 3}),
    ("olmoe", {"num_key_value_heads": 2}),
    (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ),
]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=str)
def test_names_shapes_and_dtypes_are_those_that_transformers_saves(tmp_path, kind, changes):
    write_model(kind, tmp_path, **changes)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = read_hf_config(tmp_path)
    assert hf_tensor_shapes(config) == saved
    assert family_of(config).dtypes(config, "float32") == dict.fromkeys(saved, "float32")


@pytest.mark.parametrize(
    ("kind", "layers", "name"),
    [
        ("deepseek_v3", (1, 2, 3), "mlp.gate.e_score_correction_bias"),
        ("glm4_moe", (1, 2, 3), "mlp.gate.e_score_correction_bias"),
        ("minimax_m2", (0, 1, 2, 3), "block_sparse_moe.e_score_correction_bias"),
    ],
)
def test_the_bias_that_chooses_experts_stays_in_float32(tmp_path, kind, layers, name):
    config = read_hf_config(write_model(kind, tmp_path))
    dtypes = family_of(config).dtypes(config, "bfloat16")
    kept = [name for name, dtype in dtypes.items() if dtype != "bfloat16"]
    assert kept == [f"model.layers.{i}.{name}" for i in layers]


def test_every_second_layer_is_moe_with_a_sparse_step_of_two():
    names = hf_tensor_shapes(model_config(mlp_only_layers=[], decoder_sparse_step=2))
    assert "model.layers.1.mlp.gate.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names


def test_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match=r"NoSuchForCausalLM.*Qwen3MoeForCausalLM"):
        family_of({"architectures": ["NoSuchForCausalLM"]})


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_known_architecture_that_is_refused_says_why(architecture):
    with pytest.raises(ValueError, match=rf"{architecture}.*{re.escape(REFUSED[architecture])}"):
        family_of({"architectures": [architecture]})
    assert architecture not in FAMILIES


def test_missing_settings_are_named():
    config = model_config()
    del config["hidden_size"]
    with pytest.raises(ValueError, match=r"config.json of Qwen3MoeForCausalLM lacks 'hidden_size'"):
        hf_tensor_shapes(config)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=True in .*config.json: only False"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*only 'silu'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3"}},
            "low_freq_factor=None.*1.0 built in",
        ),
        (
            "qwen3_moe",
            {"rope_scaling": {"type": "yarn"}, "rope_parameters": None},
            "rope_type='yarn'",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "fp8.*mcore-rl-ckpt dequantize",
        ),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "awq"}},
            "'awq'.*only 'fp8' and 'mxfp4'",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'.*only 'noaux_tc'"),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 2},
            "num_experts_per_tok=2 and topk_group=2.*by its best 1",
        ),
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window=4096.*only None"),
        ("mixtral", {"rope_theta": None, "rope_parameters": None}, "it lacks 'rope_theta'"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": None},
            "lacks 'shared_expert_intermediate_size'",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0.*only None"),
        ("glm4_moe", {"n_group": 4, "topk_group": 4}, "num_experts_per_tok=4 and topk_group=4"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'.*only 'per_layer'"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "the model by its best 1",
        ),
    ],
)
def test_what_is_not_carried_is_refused_by_name(tmp_path, kind, changes, message):
    config = read_hf_config(write_model(kind, tmp_path))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(config | changes, Path("model/config.json"))


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_layers_are_carried_and_nothing_else(tmp_path, kind):
    config = read_hf_config(write_model(kind, tmp_path)) | {"num_nextn_predict_layers": 1}
    family = family_of(config)
    assert family.is_carried(config, "model.layers.4.eh_proj.weight")
    assert not family.is_carried(config, "model.layers.3.mlp.gate.weight")
    assert not family.is_carried(config, "model.layers.40.mlp.gate.weight")
    assert not family.is_carried(
        config | {"num_nextn_predict_layers": 0}, "model.layers.4.eh_proj.weight"
    )


def test_half_of_a_head_is_rotated_where_the_model_says_so(tmp_path):
    config = read_hf_config(write_model("minimax_m2", tmp_path))
    rotary_share = family_of(config).rotary_share
    assert rotary_share(config) == 0.5
    published = {k: v for k, v in config.items() if k != "rope_parameters"} | {"rotary_dim": 4}
    assert rotary_share(published) == 0.25
    glm = FAMILIES["Glm4MoeForCausalLM"].rotary_share
    assert (glm({}), glm({"partial_rotary_factor": 1.0})) == (0.5, 1.0)


def test_every_family_has_a_tiny_model(tmp_path):
    described = (family_of(read_hf_config(write_model(kind, tmp_path / kind))) for kind in MODELS)
    assert {family.architecture for family in described} == {
        family.architecture for family in CAUSAL
    }
