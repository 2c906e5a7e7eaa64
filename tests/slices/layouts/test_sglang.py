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
        (SGLangSizes(tp=2, ep=4), "ep = 4 does not divide tp = 2"),
        (SGLangSizes(tp=4, dp=3), "dp = 3 does not divide tp = 4"),
        (SGLangSizes(tp=3, ep=3), "ep = 3 does not divide experts = 4"),
        (SGLangSizes(tp=3), "q_proj.weight: 3 ranks do not divide 8"),
        (SGLangSizes(tp=8, ep=1), "experts.*: 8 ranks do not divide 4"),
    ],
)
def test_what_does_not_divide_is_named(sizes, message):
    config = model_config()
    with pytest.raises(ValueError, match=message):
        layout = sglang_layout(config, sizes)
        for name in layout.all_names():
            layout.placement(name)
