"""Nemotron-3: which layers have what, where rows of Mamba-2 layers lie, and what is refused."""

from typing import Any

import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.layouts.tensors import Tensors, cut_blocks
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.nemotron import NEMOTRON_H, read_pattern
from mcore_rl.weights.models.recipe_checks import check_layout, check_sharing

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "MEM*-",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 3,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "ssm_state_size": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "moe_shared_expert_intermediate_size": 8,
    "layer_norm_epsilon": 1e-5,
}
LATENT = {**CONFIG, "moe_latent_size": 6}


def test_each_layer_has_the_tensors_of_its_letter() -> None:
    shapes = NEMOTRON_H.shapes(CONFIG)
    of_layers = [
        {name.split(".", 3)[3] for name in shapes if name.startswith(f"backbone.layers.{layer}.")}
        for layer in range(5)
    ]
    assert of_layers[0] == of_layers[2] >= {"mixer.A_log", "mixer.conv1d.bias", "norm.weight"}
    assert of_layers[1] >= {"mixer.gate.weight", "mixer.experts.3.up_proj.weight", "norm.weight"}
    assert of_layers[3] == {f"mixer.{x}_proj.weight" for x in "qkvo"} | {"norm.weight"}
    assert of_layers[4] == {"mixer.up_proj.weight", "mixer.down_proj.weight", "norm.weight"}
    assert shapes["backbone.layers.0.mixer.in_proj.weight"] == (2 * 12 + 2 * 10 + 4, 8)
    assert shapes["backbone.layers.0.mixer.conv1d.weight"] == (12 + 2 * 10, 1, 4)


def test_experts_of_super_are_narrower_than_the_model() -> None:
    latent = NEMOTRON_H.shapes(LATENT)
    added = latent.keys() - NEMOTRON_H.shapes(CONFIG).keys()
    assert added == {f"backbone.layers.1.mixer.fc{n}_latent_proj.weight" for n in (1, 2)}
    assert latent["backbone.layers.1.mixer.experts.0.up_proj.weight"] == (4, 6)
    assert latent["backbone.layers.1.mixer.experts.0.down_proj.weight"] == (6, 4)
    assert latent["backbone.layers.1.mixer.shared_experts.up_proj.weight"] == (8, 8)


def test_each_part_of_a_projection_is_cut_for_itself() -> None:
    found = Tensors(NEMOTRON_H, CONFIG, "bfloat16").find("backbone.layers.0.mixer.in_proj.weight")
    assert found is not None
    first, second = cut_blocks(found.entry, NEMOTRON_H.sizes(CONFIG), 2)
    rows = [[(start[0], stop[0]) for start, stop in boxes] for boxes in (first, second)]
    # z 0-11, x 12-23, B 24-33, C 34-43, dt 44-47
    assert rows[0] == [(0, 6), (12, 18), (24, 29), (34, 39), (44, 46)]
    assert rows[1] == [(6, 12), (18, 24), (29, 34), (39, 44), (46, 48)]


@pytest.mark.parametrize(
    "kinds",
    [
        ["mamba", "moe", "mamba", "attention", "mlp"],
        ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    ],
)
def test_layers_are_named_by_letters_or_in_words(kinds: list[str]) -> None:
    named = {**CONFIG, "layers_block_type": kinds}
    assert read_pattern({**named, "hybrid_override_pattern": None}) == "MEM*-"
    refuse_unsupported(named)
    with pytest.raises(ValueError, match="not what hybrid_override_pattern=MEM"):
        refuse_unsupported({**named, "layers_block_type": kinds[::-1]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MEMG-"}, "hybrid_override_pattern has G"),
        ({"num_hidden_layers": 6}, "5 layers, and num_hidden_layers=6"),
        ({"mamba_n_groups": 3}, "n_groups=3 does not divide mamba_num_heads=4"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"conv_kernel": 3}, "conv_kernel=3"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        ({"use_conv_bias": False}, "use_conv_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"n_group": 2, "topk_group": 2}, "num_experts_per_tok=2 and topk_group=2"),
        ({"ssm_state_size": None}, "lacks 'ssm_state_size'"),
    ],
)
def test_other_models_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    refuse_unsupported(CONFIG)
    refuse_unsupported(LATENT)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**CONFIG, **changes})


def test_layouts_that_do_not_divide_mamba_layers_are_refused() -> None:
    config = {**CONFIG, "num_hidden_layers": 8, "hybrid_override_pattern": "ME" * 4}
    check_layout(config, ParallelConfig(tp=2, cp=2))
    with pytest.raises(ValueError, match="tp=4 does not divide n_groups=2"):
        check_layout(config, ParallelConfig(tp=4))
    with pytest.raises(ValueError, match=r"tp \* parallel.cp=8 does not divide mamba_num_heads=4"):
        check_layout(config, ParallelConfig(tp=2, cp=4))
    with pytest.raises(ValueError, match="a model with Mamba-2 layers"):
        check_sharing(CONFIG, ParallelConfig())


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"mamba_n_groups": 8, "mamba_num_heads": 8}, SGLangSizes(tp=16), "does not cut the n_g"),
        ({"layers_block_type": ["full_attention"]}, SGLangSizes(), "full_attention: SGLang's"),
        ({}, SGLangSizes(tp=2, dp=2), "attention dp = 2"),
    ],
)
def test_what_engines_read_otherwise_is_refused(
    changes: dict[str, Any], sizes: SGLangSizes, message: str
) -> None:
    refuse_unserved(CONFIG, SGLangSizes(tp=2), "bfloat16")
    with pytest.raises(ValueError, match=message):
        refuse_unserved({**CONFIG, **changes}, sizes, "bfloat16")


def test_engines_know_groups_by_another_name() -> None:
    published = {key: value for key, value in CONFIG.items() if key != "mamba_n_groups"}
    with pytest.raises(ValueError, match=r"n_groups = 2.*computes with 8"):
        refuse_unserved(published, SGLangSizes(), "bfloat16")
    refuse_unserved({**published, "n_groups": 8, "mamba_num_heads": 8}, SGLangSizes(), "bfloat16")
