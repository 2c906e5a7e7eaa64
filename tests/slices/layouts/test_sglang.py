"""The recorded rule of SGLang's layouts against traced loaders of engines laid out as SGLang does it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.slices.engine_trace import trace_load_weights
from mcore_rl.slices.families import hf_tensor_shapes
from mcore_rl.slices.layouts.layout import check_rank
from mcore_rl.slices.layouts.sglang import SGLangSizes
from tests.slices.engine_layout import EngineRank
from tests.slices.layouts.strategies import models, sglang_layout
from tests.slices.megatron_layout import model_config

SMALL_VOCAB = 64 * 4


@given(models(), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_every_rank_loads_what_the_rule_says(config, tp_ep, engines):
    tp, ep = tp_ep
    config |= {"vocab_size": SMALL_VOCAB - 1}
    described = {name: (shape, torch.float32) for name, shape in hf_tensor_shapes(config).items()}
    layout = sglang_layout(config, SGLangSizes(engines=engines, tp=tp, ep=ep))
    for rank in range(tp):
        engine = EngineRank(config, rank, tp, ep, torch.float32)
        shards = trace_load_weights(engine.load_weights, described, engine.params)
        for engine_number in range(engines):
            check_rank(layout, engine_number * tp + rank, shards)


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
    config = model_config(num_experts=6 if sizes.ep == 4 else 4)
    with pytest.raises(ValueError, match=message):
        layout = sglang_layout(config, sizes)
        for name in layout.all_names():
            layout.placement(name)
