"""Models that SGLang would compute differently are refused, and the tables know all tensors."""

import pytest

from mcore_rl.weights.layouts.sglang_models import (
    BUILT_IN,
    EXPERT_AXIS,
    EXPERT_BIASES,
    RULES,
    SGLangSizes,
    refuse_unserved,
)
from mcore_rl.weights.models import CAUSAL
from tests.support.megatron_layout import model_config

GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, SGLangSizes(tp=2), "tp = 2: SGLang's OlmoeForCausalLM normalizes .* one rank only"),
        ({}, SGLangSizes(pp=2), "pp = 2: SGLang's OlmoeForCausalLM has no pipeline stages"),
        ({"norm_topk_prob": True}, SGLangSizes(), "norm_topk_prob = True: .* computes with False"),
        ({"rms_norm_eps": 1e-6}, SGLangSizes(), "rms_norm_eps = 1e-06: .* computes with 1e-05"),
        ({"num_key_value_heads": 2}, SGLangSizes(), "num_key_value_heads = 2: .* computes with 4"),
        (
            {"architectures": ["MixtralForCausalLM"]},
            SGLangSizes(),
            "head_dim = 3: .* computes with 2",
        ),
        (
            {"architectures": ["MiniMaxM2ForCausalLM"]},
            SGLangSizes(),
            "no 'use_qk_norm' in config.json: .*MiniMaxM2ForCausalLM takes that for another model",
        ),
        (
            {"architectures": ["MixtralForCausalLM"]},
            SGLangSizes(head_by_dp=True),
            "rollout.sglang.enable_dp_lm_head: SGLang's MixtralForCausalLM does not read it",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []},
            SGLangSizes(whole_dense_layers=True),
            "rollout.sglang.moe_dense_tp_size: SGLang's Qwen3MoeForCausalLM does not read it",
        ),
        (
            GPT_OSS,
            SGLangSizes(whole_shared_experts=True),
            "rollout.sglang.moe_a2a_backend: SGLang's GptOssForCausalLM does not read it",
        ),
        (
            GPT_OSS,
            SGLangSizes(tp=2, ep=2),
            "ep = 2: SGLang's GptOssForCausalLM loads .* on every rank",
        ),
        (
            GPT_OSS | {"torch_dtype": "bfloat16"},
            SGLangSizes(),
            "dtype = bfloat16 in config.json and float32 for the engine: .* would mix the two",
        ),
    ],
)
def test_what_sglang_would_compute_otherwise_is_refused(changes, sizes, message):
    config = model_config(head_dim=3, rms_norm_eps=1e-5, num_key_value_heads=4)
    with pytest.raises(ValueError, match=message):
        refuse_unserved(
            config | {"architectures": ["OlmoeForCausalLM"]} | changes, sizes, "float32"
        )


def test_a_supported_model_passes_in_all_sizes() -> None:
    config = model_config(mlp_only_layers=[])
    for sizes in (SGLangSizes(), SGLangSizes(2, tp=4, ep=2, pp=2, dp=2)):
        refuse_unserved(config, sizes, "bfloat16")
    assert SGLangSizes(2, tp=4, pp=3).engine_ranks == 12


def test_every_module_of_every_family_has_a_rule() -> None:
    for family in CAUSAL:
        for rule in family.rules:
            if rule.where == "mtp":  # engines hold none
                continue
            for tensor in rule.tensors:
                suffix = tensor.name.partition("{layer}.")[2] or tensor.name
                if rule.has_expert_axis:
                    assert ".".join(suffix.split(".")[-2:]) in EXPERT_AXIS, tensor.name
                    continue
                module, _, kind = suffix.rpartition(".")
                known = kind in EXPERT_BIASES or kind == "sinks" or module in RULES
                assert known, tensor.name


def test_architectures_in_the_tables_are_families() -> None:
    assert set(BUILT_IN) <= {family.architecture for family in CAUSAL}
