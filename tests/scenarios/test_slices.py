"""Slices bring weights from any Megatron layout to any engine layout.

The oracle is an engine that loaded the same weights itself.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.plan.whole import make_plan
from tests.support.engine_layout import EngineRank
from tests.support.megatron_layout import TrainLayout, hf_weights, model_config, train_ranks
from tests.support.reshard import reshard

CONFIGS = st.builds(
    model_config,
    vocab_size=st.integers(9, 20),
    num_hidden_layers=st.integers(2, 3),
    num_attention_heads=st.sampled_from([4, 8]),
    num_key_value_heads=st.sampled_from([2, 4]),
    head_dim=st.sampled_from([1, 2]),
    num_experts=st.sampled_from([4, 8]),
    mlp_only_layers=st.lists(st.integers(0, 1), max_size=1),
    tie_word_embeddings=st.booleans(),
)


@st.composite
def train_layouts(draw: st.DrawFn) -> TrainLayout:
    tp, dp, pp = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
    )
    etp, ep = draw(
        st.sampled_from(
            [n for n in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)) if tp * dp % (n[0] * n[1]) == 0]
        )
    )
    return TrainLayout(tp, pp, dp, ep, etp, vpp=1, layer_axis=draw(st.booleans()))


@given(CONFIGS, train_layouts(), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]))
@settings(max_examples=2 * settings().max_examples)
def test_engines_end_up_with_what_they_would_have_loaded(config, layout, engine_sizes):
    tp, ep = engine_sizes
    shapes = hf_tensor_shapes(config)
    weights = hf_weights(shapes)
    ranks = train_ranks(config, weights, layout)
    held = [make_training_shards(rank.parts, family_of(config), config) for rank in ranks]
    engines = [EngineRank(config, rank, tp, ep) for rank in range(tp)]
    described = {name: (shape, torch.int64) for name, shape in shapes.items()}
    wanted = [
        trace_load_weights(engine.load_weights, described, engine.params).shards
        for engine in engines
    ]
    reshard(
        make_plan(held, wanted),
        [rank.tensors for rank in ranks],
        [engine.params for engine in engines],
    )
    for rank, engine in enumerate(engines):
        loaded = EngineRank(config, rank, tp, ep)
        loaded.load_weights(weights.items())
        for name, param in loaded.params.items():
            assert torch.equal(engine.params[name], param), name
