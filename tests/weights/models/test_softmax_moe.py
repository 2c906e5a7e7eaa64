"""Qwen3-MoE, Mixtral and OLMoE: norms, names of the experts, and when scores are normalized."""

import json
from pathlib import Path

import pytest

from mcore_rl.weights.models.qwen_llama_mixtral import MIXTRAL, OLMOE, QWEN3_MOE
from mcore_rl.weights.models.table import Family
from tests.support.megatron_layout import model_config

CONFIG = model_config()


@pytest.mark.parametrize(
    ("family", "q_norm", "expert"),
    [
        (QWEN3_MOE, (2,), "mlp.experts.3.gate_proj"),
        (MIXTRAL, None, "block_sparse_moe.experts.3.w1"),
        (OLMOE, (8,), "mlp.experts.3.gate_proj"),
    ],
)
def test_norms_of_queries_and_names_of_experts(
    family: Family, q_norm: tuple[int, ...] | None, expert: str
) -> None:
    shapes = family.shapes(CONFIG)
    assert shapes.get("model.layers.0.self_attn.q_norm.weight") == q_norm
    ffn = 4 if family is QWEN3_MOE else 8
    assert shapes[f"model.layers.0.{expert}.weight"] == (ffn, 8)


@pytest.mark.parametrize(
    ("family", "normalized", "pre_softmax"),
    [
        (QWEN3_MOE, True, False),
        (QWEN3_MOE, False, True),
        (OLMOE, False, True),
        (MIXTRAL, False, False),
    ],
)
def test_mixtral_normalizes_the_scores_of_the_chosen_whatever_the_setting(
    family: Family, normalized: bool, pre_softmax: bool
) -> None:
    options = family.options(CONFIG | {"norm_topk_prob": normalized})
    assert options["moe_router_pre_softmax"] == pre_softmax


def test_only_qwen3_moe_has_dense_layers() -> None:
    layers = [family.is_moe_layer(CONFIG, 1) for family in (QWEN3_MOE, MIXTRAL, OLMOE)]
    assert layers == [False, True, True]


@pytest.mark.parametrize(
    ("model", "family", "billions"),
    [
        ("qwen3_30b_a3b", QWEN3_MOE, 30.5),
        ("qwen3_235b_a22b", QWEN3_MOE, 235.1),
        ("mixtral_8x7b", MIXTRAL, 46.7),
    ],
)
def test_parameters_add_up_to_the_published_number(
    model: str, family: Family, billions: float
) -> None:
    config = json.loads(Path(f"recipes/model/{model}/config.json").read_text())
    total = 0
    for shape in family.shapes(config).values():
        total += shape[0] * (shape[1] if len(shape) == 2 else 1)
    assert total / 1e9 == pytest.approx(billions, abs=0.06)
