"""The table of Qwen3-MoE against what transformers itself saves."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.slices.families import family_of, hf_tensor_shapes
from mcore_rl.slices.hf_files import read_hf_config
from tests.slices.megatron_layout import model_config


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"mlp_only_layers": []}])
def test_names_and_shapes_are_those_that_transformers_saves(tmp_path, changes):
    settings = {k: v for k, v in model_config(**changes).items() if k != "architectures"}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_tensor_shapes(read_hf_config(tmp_path)) == saved


def test_every_second_layer_is_moe_with_a_sparse_step_of_two():
    names = hf_tensor_shapes(model_config(mlp_only_layers=[], decoder_sparse_step=2))
    assert "model.layers.1.mlp.gate.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.mlp.gate.weight" not in names


def test_unknown_architecture_is_refused_by_name():
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*Qwen3MoeForCausalLM"):
        family_of({"architectures": ["LlamaForCausalLM"]})


def test_missing_and_unsupported_settings_are_named():
    config = model_config()
    del config["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size"):
        hf_tensor_shapes(config)
    with pytest.raises(ValueError, match="attention_bias"):
        hf_tensor_shapes(model_config(attention_bias=True))
