"""Layouts survive their way as JSON; the shapes they give are those of whole tensors."""

from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.layouts.listed import ListedLayout, RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import family_of
from tests.support.megatron_layout import model_config


def test_layouts_in_a_few_numbers() -> None:
    config = model_config(num_hidden_layers=4, mlp_only_layers=[])
    engines = SGLangSizes(engines=1, tp=2, ep=2)
    recorded = RecordedLayouts(config, "bfloat16", MegatronSizes(128, tp=2, pp=2, ep=2), engines)
    again = RecordedLayouts.decode(recorded.encode())
    assert again == recorded
    assert again.encode() == recorded.encode()
    shapes = {name: (shape, "bfloat16") for name, shape in family_of(config).shapes(config).items()}
    assert again.source().hf_tensors() == shapes


def test_shapes_are_those_that_the_boxes_reach() -> None:
    left = Shard(Box("a", (0, 0), (2, 4)), "fused", 0, (4, 1), "bfloat16")
    right = Shard(Box("a", (0, 4), (2, 8)), "fused", 12, (4, 1), "bfloat16")
    norm = Shard(Box("b", (0,), (7,)), "norm", 0, (1,), "float32")
    layout = ListedLayout([[left, norm], [right, norm]])
    assert layout.hf_tensors() == {"a": ((2, 8), "bfloat16"), "b": ((7,), "float32")}
