"""Sizes and options that families share, and the settings that are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.models.settings import (
    drop_quantization,
    find_group_refusal,
    find_rope_theta_refusal,
    is_after_dense_layers,
    is_sparse_layer,
    make_latent_options,
    make_shared_expert_options,
    match_mtp_names,
    need,
    read_grouped_query_sizes,
    read_latent_sizes,
    read_rope,
    read_rotary_share,
    read_shared_expert_sizes,
    refuse_quantized,
)

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
LATENT = {
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def test_the_first_key_that_has_a_value_counts() -> None:
    assert need({"a": None, "b": 3}, "a", "b") == 3
    with pytest.raises(ValueError, match=r"config.json of X lacks 'a'"):
        need({"architectures": ["X"], "a": None}, "a", "b")


@pytest.mark.parametrize(
    ("qk_norm", "norms"), [("none", (0, 0)), ("head", (8, 8)), ("projection", (64, 16))]
)
def test_norms_of_queries_and_keys(qk_norm: Any, norms: tuple[int, int]) -> None:
    sizes = read_grouped_query_sizes(HEADS, qk_norm=qk_norm)
    assert (sizes["q_norm"], sizes["k_norm"]) == norms
    assert (sizes["q"], sizes["kv"], sizes["kv_heads"], sizes["head"]) == (64, 16, 2, 8)
    assert (sizes["q_bias"], sizes["kv_bias"]) == (0, 0)


def test_heads_may_be_wider_than_the_hidden_size_and_have_biases() -> None:
    sizes = read_grouped_query_sizes(HEADS | {"head_dim": 32}, qkv_bias=True)
    assert (sizes["q"], sizes["kv"]) == (sizes["q_bias"], sizes["kv_bias"]) == (256, 64)
    assert read_grouped_query_sizes({**HEADS, "num_key_value_heads": None})["kv_heads"] == 8


@pytest.mark.parametrize(("q_lora_rank", "whole_q"), [(None, 96), (24, 0)])
def test_latent_sizes(q_lora_rank: int | None, whole_q: int) -> None:
    sizes = read_latent_sizes(LATENT | {"q_lora_rank": q_lora_rank})
    assert (sizes["q"], sizes["whole_q"], sizes["q_rank"]) == (96, whole_q, q_lora_rank or 0)
    assert (sizes["kv_down"], sizes["kv_up"], sizes["v"]) == (40, 112, 48)


def test_yarn_is_passed_on_with_its_defaults() -> None:
    plain = make_latent_options(LATENT)
    assert (plain["rope_type"], plain["rotary_scaling_factor"]) == ("rope", 1.0)
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    scaled = make_latent_options(LATENT | {"rope_scaling": yarn, "rope_theta": 50000})
    assert (scaled["rope_type"], scaled["rotary_scaling_factor"]) == ("yarn", 40.0)
    assert (scaled["rotary_base"], scaled["beta_fast"], scaled["beta_slow"]) == (50000.0, 32.0, 1.0)


def test_shared_experts_are_one_mlp_and_groups_need_both_keys() -> None:
    config = {"moe_intermediate_size": 10, "n_routed_experts": 4, "n_shared_experts": 3}
    config["num_experts_per_tok"] = 2
    sizes = read_shared_expert_sizes(config)
    assert (sizes["experts"], sizes["shared_ffn"]) == (4, 30)
    assert "moe_router_num_groups" not in make_shared_expert_options(config, sizes)
    grouped = make_shared_expert_options(config | {"n_group": 2, "topk_group": 1}, sizes)
    assert (grouped["moe_router_num_groups"], grouped["moe_router_group_topk"]) == (2, 1)


@pytest.mark.parametrize(
    ("n_group", "topk_group", "refused"), [(1, 4, False), (8, 4, False), (8, 2, True)]
)
def test_groups_that_megatron_scores_differently_are_refused(
    n_group: int, topk_group: int, refused: bool
) -> None:
    config = {"n_group": n_group, "topk_group": topk_group, "num_experts_per_tok": 8}
    assert bool(find_group_refusal(config, scored_by=2)) == refused


@given(st.integers(0, 20), st.lists(st.integers(0, 20)), st.integers(1, 4))
def test_sparse_layers_are_every_nth_but_those_that_are_listed(
    layer: int, dense: list[int], step: int
) -> None:
    config = {"num_experts": 4, "mlp_only_layers": dense, "decoder_sparse_step": step}
    assert is_sparse_layer(config, layer) == (layer not in dense and layer % step == step - 1)
    assert not is_sparse_layer(config | {"num_experts": 0}, layer)


def test_the_first_layers_may_be_dense() -> None:
    config = {"first_k_dense_replace": 2}
    assert [is_after_dense_layers(config, layer) for layer in range(4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(("count", "pattern"), [(0, ""), (2, r"model\.layers\.(4|5)\..*")])
def test_prediction_layers_come_after_the_others(count: int, pattern: str) -> None:
    assert match_mtp_names({"num_hidden_layers": 4, "num_nextn_predict_layers": count}) == pattern


@pytest.mark.parametrize(
    ("config", "kind", "theta"),
    [
        ({}, "default", 10000.0),
        ({"rope_theta": 5.0}, "default", 5.0),
        ({"rope_scaling": {"type": "yarn"}}, "yarn", 10000.0),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0}}, "llama3", 7.0),
    ],
)
def test_rotary_settings_are_read_in_both_spellings(
    config: dict[str, Any], kind: str, theta: float
) -> None:
    rope = read_rope(config)
    assert (rope["rope_type"], rope["rope_theta"]) == (kind, theta)


def test_a_missing_theta_is_refused_and_a_rotated_share_is_found() -> None:
    assert find_rope_theta_refusal({}) == "it lacks 'rope_theta'"
    assert find_rope_theta_refusal({"rope_theta": 1.0}) == ""
    assert find_rope_theta_refusal({"rope_parameters": {"rope_theta": 1.0}}) == ""
    assert read_rotary_share({}, default=0.5) == 0.5
    assert read_rotary_share({"partial_rotary_factor": 0.25}, default=0.5) == 0.25
    assert read_rotary_share({"rope_parameters": {"partial_rotary_factor": 1}}, 0.5) == 1.0


@pytest.mark.parametrize(
    ("quantization", "remedy"),
    [
        ({"quant_method": "fp8"}, "mcore-rl-ckpt dequantize"),
        ({"quant_method": "gptq"}, "only 'fp8' and 'mxfp4' can be converted"),
        ("fp4", "quant_method='fp4'"),
    ],
)
def test_quantized_weights_are_refused_with_a_remedy(quantization: object, remedy: str) -> None:
    config = {"a": 1, "quantization_config": quantization}
    with pytest.raises(ValueError, match=remedy):
        refuse_quantized(config, "config.json")
    assert drop_quantization(config) == {"a": 1}
    refuse_quantized(drop_quantization(config), "config.json")
