"""Adapters that engines cannot serve are refused by name; factors get zeros beside them."""

from pathlib import Path

import pytest
import torch

from mcore_rl.weights.hf.config import parse_hf_config
from mcore_rl.weights.lora.served import (
    list_served_modules,
    make_engine_config,
    make_engine_factors,
    refuse_unserved,
)
from tests.support.tiny_models import write_model

LAYER = "model.layers.0"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("qwen3_moe", (), "'model.layers.0.mlp.experts.0.gate_proj.weight': engines here serve no"),
        ("qwen3_moe", ("q_proj", "up_proj"), "set train.lora.targets=.q_proj,k_proj,v_proj,o_proj"),
        ("deepseek_v3", ("kv_b_proj",), "kv_b_proj.weight': engines serve those of q_proj"),
    ],
)
def test_what_engines_do_not_serve_is_refused(
    tmp_path: Path, kind: str, targets: tuple[str, ...], message: str
) -> None:
    config = parse_hf_config(write_model(kind, tmp_path))
    with pytest.raises(ValueError, match=message):
        refuse_unserved(config, targets, experts=True)


def test_dense_layers_beside_experts_are_refused(tmp_path: Path) -> None:
    config = parse_hf_config(write_model("deepseek_v3", tmp_path))
    with pytest.raises(ValueError, match="engines serve factors of attention alone"):
        refuse_unserved(config, ("o_proj", "down_proj"), experts=False)


def test_all_layers_of_a_dense_model_and_attention_of_others_are_served(tmp_path: Path) -> None:
    refuse_unserved(parse_hf_config(write_model("qwen3", tmp_path / "a")), (), experts=True)
    config = parse_hf_config(write_model("qwen3_moe", tmp_path / "b"))
    refuse_unserved(config, ATTENTION, experts=True)


def test_joined_projections_are_served_together() -> None:
    names = [f"{LAYER}.self_attn.v_proj.weight", f"{LAYER}.mlp.up_proj.weight"]
    assert list_served_modules(names) == (*ATTENTION[:3], "gate_proj", "up_proj")
    config = make_engine_config(names, 8, 2.5)
    assert config["lora_alpha"] / config["r"] == 2.5


def test_factors_that_are_missing_beside_others_are_zero_and_the_rest_are_copies() -> None:
    shapes = {
        f"{LAYER}.self_attn.{module}.weight": (rows, 8)
        for module, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4), ("o_proj", 8))
    }
    name = f"{LAYER}.self_attn.q_proj.weight"
    given = {f"{name}.A": torch.randn(2, 8), f"{name}.B": torch.randn(8, 2)}
    made = make_engine_factors(given, shapes)
    prefix = f"base_model.model.{LAYER}.self_attn."
    assert {key.removeprefix(prefix) for key in made} == {
        f"{module}.lora_{letter}.weight" for module in ATTENTION[:3] for letter in "AB"
    }
    assert made[f"{prefix}k_proj.lora_B.weight"].shape == (4, 2)
    assert not made[f"{prefix}v_proj.lora_A.weight"].any()
    given[f"{name}.A"].zero_()
    assert made[f"{prefix}q_proj.lora_A.weight"].any()
