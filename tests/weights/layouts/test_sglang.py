"""Layouts of engines that do not divide, or that SGLang has no code for, are refused by name.

tests/scenarios/rollout compares the layouts with SGLang itself.
"""

import pytest

from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.layout_strategies import GROUPED, sglang_layout
from tests.support.megatron_layout import model_config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (SGLangSizes(tp=2, ep=4), "ep = 4 does not divide engine's tp = 2"),
        (SGLangSizes(tp=4, dp=3), "attention dp = 3 does not divide engine's tp = 4"),
        (SGLangSizes(tp=4, ep=4), "engine's ep = 4 does not divide experts = 6"),
        (SGLangSizes(tp=3), "engine's tp / dp = 3 does not divide attention heads = 4"),
        (SGLangSizes(tp=8, dp=2), "ranks = 8 does not divide axis 0 of SGLang's mlp.experts"),
    ],
)
def test_what_does_not_divide_is_named(sizes, message):
    config = model_config(num_experts=6 if sizes.ep == 4 else 4, mlp_only_layers=[])
    with pytest.raises(ValueError, match=message):
        layout = sglang_layout(config, sizes)
        for name in layout.all_names():
            layout.placement(name)


@pytest.mark.parametrize(
    ("architecture", "tied", "sizes", "message"),
    [
        (
            "LlamaForCausalLM",
            False,
            SGLangSizes(tp=2, dp=2),
            "LlamaForCausalLM has no DP attention",
        ),
        (
            "LlamaForCausalLM",
            True,
            SGLangSizes(pp=2),
            "pp = 2: SGLang's LlamaForCausalLM lacks a head",
        ),
        (
            "Qwen3MoeForCausalLM",
            True,
            SGLangSizes(),
            "Qwen3MoeForCausalLM has an output layer of its own",
        ),
    ],
)
def test_what_sglang_cannot_do_is_refused(architecture, tied, sizes, message):
    config = model_config(mlp_only_layers=[]) | GROUPED
    config |= {"architectures": [architecture], "tie_word_embeddings": tied}
    with pytest.raises(ValueError, match=message):
        sglang_layout(config, sizes)


def test_dense_layers_among_the_experts_are_refused_where_sglang_has_none():
    with pytest.raises(
        ValueError,
        match=r"mlp_only_layers .* dense layer 1: SGLang's Qwen3MoeForCausalLM has experts",
    ):
        sglang_layout(model_config(mlp_only_layers=[1]), SGLangSizes())
