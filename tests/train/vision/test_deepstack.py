"""Features of the tower are added behind the first layers, once each, recomputed or not."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.train.model import make_chunks
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.train.vision.model import (
    DeepstackLayer,
    count_carried_features,
    join_features,
    part_features,
    spread_features,
)
from tests.support.distributed import run_alone
from tests.support.tiny_qwen3_vl import TEXT, VISION

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **TEXT,
    "rms_norm_eps": 1e-6,
    "vision_config": VISION,
}


def test_text_gets_no_features() -> None:
    rows_t = torch.tensor([-1, 1, 0, -1])
    features = (torch.ones(2, 3), torch.tensor([[2.0] * 3, [5.0] * 3]))
    spread = spread_features(features, rows_t, torch.zeros(1, dtype=torch.bfloat16))
    assert spread is not None and spread.dtype == torch.bfloat16
    assert spread[:, :, 0, 0].tolist() == [[0, 1, 1, 0], [0, 5, 2, 0]]
    assert spread_features((), rows_t, torch.zeros(1)) is None


@given(st.integers(1, 5), st.integers(0, 4))
def test_features_travel_as_rows_below_the_hidden_states(num_tokens: int, num: int) -> None:
    hidden_t1H = torch.rand(num_tokens, 1, 3)
    features_Kt1H = torch.rand(num, num_tokens, 1, 3) if num else None
    rows = join_features(hidden_t1H, features_Kt1H)
    assert rows.shape == ((1 + num) * num_tokens, 1, 3)
    hidden, features = part_features(rows, num_tokens)
    assert torch.equal(hidden, hidden_t1H)
    if features_Kt1H is None:
        assert features is None
    else:
        assert features is not None and torch.equal(features, features_Kt1H)


def carried_by(config: dict[str, Any]) -> tuple[int, int]:
    megatron = make_transformer_config(config, ParallelConfig(), torch.float32, TrainConfig())
    [chunk] = make_chunks(megatron, config)
    return count_carried_features(chunk)


def test_a_chunk_with_all_layers_sends_no_features_on() -> None:
    """Features of the first stage come from its tower, so 3 of them begin before layer 0."""
    assert run_alone(carried_by, CONFIG) == (3, 0)


def with_features(recompute: str) -> tuple[list[str], Tensor, Tensor]:
    """Return the kinds of layers, the output of layers of zeros, and the features' gradient."""
    train = TrainConfig(recompute=recompute)
    config = make_transformer_config(CONFIG, ParallelConfig(), torch.float32, train)
    [chunk] = make_chunks(config, CONFIG)
    decoder: Any = chunk.decoder
    for parameter in decoder.layers.parameters():
        parameter.data.zero_()
    decoder.final_layernorm = None
    features_Kt1H = torch.rand(3, 4, 1, 64, requires_grad=True)
    shared_Kt1H = features_Kt1H * 1.0
    hidden_t1H = torch.rand(4, 1, 64, requires_grad=True)
    angles = torch.zeros(4, 1, 1, 16)
    lens = torch.tensor([0, 4], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lens, cu_seqlens_kv=lens, max_seqlen_q=4, max_seqlen_kv=4
    )
    out_t1H = decoder(
        hidden_t1H, None, context=shared_Kt1H, rotary_pos_emb=angles, packed_seq_params=packed
    )
    out_t1H.square().sum().backward()
    assert features_Kt1H.grad is not None
    added = out_t1H.detach() - hidden_t1H.detach() - features_Kt1H.detach().sum(0)
    kinds = [type(layer).__name__ for layer in decoder.layers]
    return kinds, added, features_Kt1H.grad - 2 * out_t1H.detach()


@pytest.mark.gloo
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_layers_that_do_nothing_add_all_features(recompute: str) -> None:
    kinds, added, gradient = run_alone(with_features, recompute)
    assert kinds == [DeepstackLayer.__name__] * 4
    torch.testing.assert_close(added, torch.zeros_like(added), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)
