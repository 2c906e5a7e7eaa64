"""The linear layers of each family, by the names of their modules; others are refused."""

import pytest

from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.targets import list_targets, name_modules, refuse_unused
from mcore_rl.weights.models.value_head import add_value_head

MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("qwen3_30b_a3b", ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]),
        (
            "deepseek_v3",
            ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP],
        ),
        ("gpt_oss_20b", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
def test_modules_of_a_family(model: str, modules: list[str]) -> None:
    config = ModelFacts.read(f"recipes/model/{model}").config
    assert sorted(name_modules(config)) == sorted(modules)


def test_experts_are_adapted_one_by_one() -> None:
    config = ModelFacts.read("recipes/model/qwen3_30b_a3b").config
    every = list_targets(config, [])
    assert len(every) == 48 * (4 + 128 * 3)
    assert len(list_targets(config, [], experts=False)) == 48 * 4
    assert len(list_targets(config, ["gate_proj"])) == 48 * 128


def test_what_is_no_layer_is_refused() -> None:
    config = ModelFacts.read("recipes/model/qwen3_30b_a3b").config
    with pytest.raises(ValueError, match=r"targets has 'lm_head'.*it has q_proj"):
        list_targets(config, ["q_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"experts=false: only routed experts have these layers"):
        list_targets(config, ["up_proj"], experts=False)
    dense = ModelFacts.read("recipes/model/gpt_oss_20b").config
    with pytest.raises(ValueError, match=r"no expert of this model has matrices of its own"):
        refuse_unused(dense, experts=False)
    refuse_unused(config, experts=False)
    with pytest.raises(ValueError, match=r"^critic\.lora\.targets has 'score'"):
        list_targets(add_value_head(config), ["score"])
