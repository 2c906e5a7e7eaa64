"""Rules of a table: keys are found, and shapes and dtypes follow from the sizes."""

import pytest

from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

LAYER = "model.layers.{layer}."
QKV = Rule(
    "decoder.layers.qkv.weight",
    (HfTensor(LAYER + "q", ("q", "hidden")), HfTensor(LAYER + "k", ("kv", "hidden"))),
    groups="kv_heads",
)
DENSE = Rule("decoder.layers.mlp", (HfTensor(LAYER + "mlp", ("hidden",)),), "dense")
EXPERT = Rule(
    "decoder.layers.fc", (HfTensor(LAYER + "experts.{expert}.up", ("ffn", "hidden")),), "moe"
)
STACKED = Rule(
    "decoder.layers.down",
    (HfTensor(LAYER + "down", ("experts", "hidden", "ffn")),),
    "moe",
    stacked=True,
)
BIAS = Rule("decoder.layers.bias", (HfTensor(LAYER + "bias", ("experts",), "float32"),), "moe")
ABSENT = Rule("decoder.layers.norm", (HfTensor(LAYER + "norm", ("none",)),))
HEAD = Rule("output_layer.weight", (HfTensor("lm_head.weight", ("hidden",)),), "model")


def sizes(config: HfConfig) -> dict[str, int]:
    return {"layers": 3, "hidden": 4, "q": 6, "kv": 2, "ffn": 5, "experts": 2, "none": 0}


TOY = Family(
    "ToyForCausalLM",
    (QKV, DENSE, EXPERT, STACKED, BIAS, ABSENT, HEAD),
    sizes,
    is_moe_layer=lambda config, layer: layer > 0,
    options=lambda config: {},
    supported={},
    carried=lambda config: r"mtp\..*",
)


def test_shapes_are_those_of_every_tensor_that_the_model_has() -> None:
    attention = {f"model.layers.{i}.{x}": (n, 4) for i in range(3) for x, n in (("q", 6), ("k", 2))}
    experts = {f"model.layers.{i}.experts.{e}.up": (5, 4) for i in (1, 2) for e in (0, 1)}
    stacked = {f"model.layers.{i}.down": (2, 4, 5) for i in (1, 2)}
    biases = {f"model.layers.{i}.bias": (2,) for i in (1, 2)}
    rest = {"model.layers.0.mlp": (4,), "lm_head.weight": (4,)}
    assert TOY.shapes({}) == attention | experts | stacked | biases | rest


def test_a_tensor_keeps_the_dtype_of_its_own() -> None:
    dtypes = TOY.dtypes({}, "bfloat16")
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        "model.layers.1.bias",
        "model.layers.2.bias",
    }
    assert set(dtypes.values()) == {"bfloat16", "float32"}


def test_tied_embeddings_leave_the_output_layer_out() -> None:
    tied = {"tie_word_embeddings": True}
    assert TOY.find_left_out(tied) == {"lm_head.weight"}
    assert TOY.find_left_out({}) == frozenset()
    assert "lm_head.weight" not in TOY.shapes(tied)


@pytest.mark.parametrize(
    ("key", "rule", "layer"),
    [
        ("decoder.layers.qkv.weight", QKV, None),
        ("decoder.layers.17.qkv.weight", QKV, 17),
        ("output_layer.weight", HEAD, None),
    ],
)
def test_a_key_is_found_with_and_without_its_layer(key: str, rule: Rule, layer: int | None) -> None:
    assert TOY.find(key) == (rule, layer)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"'decoder.layers.0.other' is not in the table of Toy"):
        TOY.find("decoder.layers.0.other")


def test_rules_know_how_their_experts_lie() -> None:
    flags = {rule.key: (rule.has_expert_axis, rule.numbers_experts) for rule in TOY.rules}
    assert flags.pop(EXPERT.key) == (True, True)
    assert flags.pop(STACKED.key) == (True, False)
    assert set(flags.values()) == {(False, False)}
    assert STACKED.matrix_axes(STACKED.tensors[0]) == ("ffn", "hidden")
    assert EXPERT.matrix_axes(EXPERT.tensors[0]) == ("ffn", "hidden")
    assert TOY.stacks_experts


def test_carried_names_match_the_whole_pattern() -> None:
    assert TOY.is_carried({}, "mtp.weight")
    assert not TOY.is_carried({}, "model.mtp.weight")
