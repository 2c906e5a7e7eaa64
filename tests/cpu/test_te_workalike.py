"""Torch work-alikes of Transformer Engine's modules compute the same and are cut the same way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps

from mcore_rl.cpu.te_workalike import (
    DotProductAttention,
    LayerNormColumnParallelLinear,
    Norm,
)
from tests.support.distributed import run_alone


@pytest.mark.parametrize(
    ("normalization", "kind"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)]
)
def test_a_norm_is_torchs_and_marked_for_sequence_parallelism(
    normalization: str, kind: type
) -> None:
    config = SimpleNamespace(
        normalization=normalization,
        params_dtype=torch.float32,
        sequence_parallel=True,
        layernorm_zero_centered_gamma=False,
    )
    norm: Any = Norm(config, 8, eps=0.25)
    assert isinstance(norm, kind) and norm.eps == 0.25
    assert all(parameter.sequence_parallel for parameter in norm.parameters())


def norm_and_linear(normalization: str) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=2,
        normalization=normalization,
        layernorm_epsilon=0.01,
    )
    layer: Any = LayerNormColumnParallelLinear(
        6, 4, config=config, init_method=torch.nn.init.normal_, bias=False
    )
    torch.nn.init.normal_(layer.layer_norm_weight)
    rows = torch.randn(3, 1, 6)
    bias = getattr(layer, "layer_norm_bias", None)
    if bias is None:
        normed = F.rms_norm(rows, (6,), layer.layer_norm_weight, 0.01)
    else:
        normed = F.layer_norm(rows, (6,), layer.layer_norm_weight, bias, 0.01)
    wanted = F.linear(normed, layer.weight)
    names = {name for name, _ in layer.named_parameters()}
    return layer(rows)[0].detach(), wanted.detach(), names


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_norm_comes_before_the_linear(normalization: str) -> None:
    out, wanted, names = run_alone(norm_and_linear, normalization)
    torch.testing.assert_close(out, wanted)
    assert names - {"layer_norm_bias"} == {"weight", "layer_norm_weight"}


def attend() -> tuple[torch.Tensor, torch.Tensor]:
    config: Any = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=4,
        window_size=None,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
    )
    group = ps.get_context_parallel_group()
    layer = DotProductAttention(
        config, 1, None, "self", pg_collection=SimpleNamespace(cp=group, tp=group)
    )
    q, k, v = (torch.randn(5, 2, 4) for _ in range(3))
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 2, 5]))
    parts = []
    for sequence in (slice(0, 2), slice(2, 5)):
        heads = [x[sequence].transpose(0, 1) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        parts.append(out.transpose(0, 1).flatten(1))
    return layer(q, k, v, None, packed_seq_params=packed), torch.cat(parts)


def test_attention_stays_within_packed_sequences() -> None:
    out, wanted = run_alone(attend)
    torch.testing.assert_close(out, wanted)
