"""Shared rules: which HF tensors make up a Megatron tensor, in which order."""

import pytest

from mcore_rl.weights.models import CAUSAL, rules
from mcore_rl.weights.models.table import Family, Rule


def names(rule: Rule) -> list[str]:
    return [tensor.name.removeprefix(rules.HF_LAYER) for tensor in rule.tensors]


def by_key(table: tuple[Rule, ...]) -> dict[str, Rule]:
    return {rule.key.removeprefix(rules.LAYER): rule for rule in table}


def test_queries_keys_and_values_alternate_group_by_group() -> None:
    rule = by_key(rules.GROUPED_QUERY_ATTENTION)["self_attention.linear_qkv.weight"]
    assert names(rule) == [f"self_attn.{x}_proj.weight" for x in "qkv"]
    assert [tensor.axes for tensor in rule.tensors] == [
        ("q", "hidden"),
        ("kv", "hidden"),
        ("kv", "hidden"),
    ]
    assert rule.groups == "kv_heads"


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (rules.EXPERTS, ["gate_proj", "up_proj"]),
        (rules.NUMBERED_EXPERTS, ["w1", "w3"]),
    ],
)
def test_the_gate_lies_above_the_other_half(table: tuple[Rule, ...], expected: list[str]) -> None:
    rule = by_key(table)["mlp.experts.experts.linear_fc1.weight"]
    assert [name.split(".")[-2] for name in names(rule)] == expected
    assert rule.numbers_experts
    assert rule.where == "moe"


def test_the_bias_of_experts_stays_in_float32() -> None:
    rule = rules.make_expert_bias_rule("mlp.gate.e_score_correction_bias")
    (tensor,) = rule.tensors
    assert tensor.dtype == "float32"
    assert rule.key == "decoder.layers.mlp.router.expert_bias"


def test_only_embedding_and_output_layer_are_padded() -> None:
    padded = {rule.key for rule in rules.MODEL if rule.padded}
    assert padded == {"embedding.word_embeddings.weight", "output_layer.weight"}


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.architecture)
def test_no_family_has_a_key_or_a_name_twice_in_a_kind_of_layer(family: Family) -> None:
    for where in ("dense", "moe"):
        present = [rule for rule in family.rules if rule.where in ("model", "layer", where)]
        keys = [rule.key for rule in present]
        tensors = [tensor.name for rule in present for tensor in rule.tensors]
        assert len(keys) == len(set(keys))
        assert len(tensors) == len(set(tensors))
