"""gpt-oss's table: stacked experts, sinks, windows, and the settings that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.models.gpt_oss import FULL, GPT_OSS, WINDOWED

CONFIG = json.loads(Path("recipes/model/gpt_oss_20b/config.json").read_text())


def test_experts_are_stacked_and_transposed() -> None:
    shapes = GPT_OSS.shapes(CONFIG)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (32, 2880, 5760)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj_bias"] == (32, 5760)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (32, 2880, 2880)
    assert shapes["model.layers.0.self_attn.sinks"] == (64,)
    rule, _ = GPT_OSS.find("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    assert rule.matrix_axes(rule.tensors[0]) == ("gate_up", "hidden")
    assert GPT_OSS.stacks_experts
    assert GPT_OSS.alternating


def test_windows_are_those_of_the_layers() -> None:
    options = GPT_OSS.options(CONFIG)
    assert options["window_size"] == (CONFIG["sliding_window"] - 1, 0)
    assert options["window_attn_skip_freq"] == [1, 0] * 12
    assert options["softmax_type"] == "learnable"
    assert options["activation_func_clamp_value"] == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"layer_types": [FULL]}, "layer_types has 1 entries (full_attention) for 24 layers"),
        ({"layer_types": [WINDOWED] * 23 + ["chunked"]}, "(chunked, sliding_attention)"),
        ({"rope_scaling": {"attention_factor": 1.0}, "rope_parameters": None}, "attention_factor"),
        ({"rope_theta": None, "rope_parameters": None}, "lacks 'rope_theta'"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    refusal = GPT_OSS.refusal(CONFIG | changes)
    assert message in refusal
    assert bool(message) == bool(refusal)
