"""DeepSeek's tables against the published configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3


def config_of(model: str) -> dict[str, Any]:
    return json.loads(Path(f"recipes/model/{model}/config.json").read_text())


@pytest.mark.parametrize(
    ("model", "billions"), [("deepseek_v3", 671), ("kimi_k2", 1026), ("moonlight_16b_a3b", 16)]
)
def test_parameters_add_up_to_the_published_number(model: str, billions: int) -> None:
    config = config_of(model)
    assert family_of(config) is DEEPSEEK_V3
    numels = [_numel(shape) for shape in DEEPSEEK_V3.shapes(config).values()]
    assert round(sum(numels) / 1e9) == billions


def _numel(shape: tuple[int, ...]) -> int:
    rows, *columns = shape
    return rows * (columns[0] if columns else 1)


def test_v3_scores_by_sigmoid_and_keeps_the_bias_for_the_choice() -> None:
    options = DEEPSEEK_V3.options(config_of("deepseek_v3"))
    assert options["moe_router_score_function"] == "sigmoid"
    assert options["moe_router_enable_expert_bias"]
    assert options["moe_router_bias_update_rate"] == 0.0
    assert (options["moe_router_num_groups"], options["moe_router_group_topk"]) == (8, 4)
    assert options["moe_router_topk_scaling_factor"] == 2.5
    assert options["moe_shared_expert_intermediate_size"] == 2048


def test_only_v3_has_a_bias_and_prediction_layers() -> None:
    config = config_of("deepseek_v3")
    keys = [{rule.key for rule in family.rules} for family in (DEEPSEEK_V3, DEEPSEEK_V2)]
    in_layers = {key for key in keys[0] - keys[1] if not key.startswith("mtp.")}
    assert in_layers == {"decoder.layers.mlp.router.expert_bias"}
    name = "model.layers.61.eh_proj.weight"
    assert DEEPSEEK_V3.is_carried(config, name)
    assert not DEEPSEEK_V2.is_carried(config, name)


def test_rotary_frequencies_may_lie_beside_the_model() -> None:
    """Moonlight's files have them, although it predicts one token."""
    config = config_of("deepseek_v3") | {"num_nextn_predict_layers": 0}
    assert DEEPSEEK_V3.is_carried(config, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not DEEPSEEK_V3.is_carried(config, "model.layers.0.self_attn.q_proj.weight")
    assert not DEEPSEEK_V3.is_carried(config, "model.layers.61.eh_proj.weight")


def test_v2_scores_all_experts_by_softmax_before_the_choice() -> None:
    config = config_of("deepseek_v3") | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }
    refuse_unsupported(config)
    options = DEEPSEEK_V2.options(config)
    assert options["moe_router_pre_softmax"]
    assert "moe_router_enable_expert_bias" not in options


def test_queries_without_a_low_rank_are_one_projection() -> None:
    suffix = "self_attn.q_proj.weight"
    low_rank = DEEPSEEK_V3.shapes(config_of("deepseek_v3"))
    whole = DEEPSEEK_V3.shapes(config_of("moonlight_16b_a3b"))
    assert f"model.layers.0.{suffix}" not in low_rank
    assert whole[f"model.layers.0.{suffix}"] == (16 * (128 + 64), 2048)
    assert "model.layers.0.self_attn.q_a_proj.weight" not in whole
