"""A value head gives one float32 number per token; tests/train/test_critic.py trains one."""

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.train.model import ValueHead
from tests.support.distributed import run_alone


def values() -> tuple[Tensor, Tensor]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    head = ValueHead(config)
    torch.nn.init.normal_(head.weight)
    assert head.weight.shape == (1, 8) and head.weight.dtype == torch.bfloat16
    hidden_T18 = torch.randn(5, 1, 8).bfloat16()
    out, bias = head(hidden_T18, None, runtime_gather_output=False)
    assert bias is None
    return out.detach(), F.linear(hidden_T18.double(), head.weight.double()).detach()


def test_values_are_computed_in_float32() -> None:
    out_T11, wanted_T11 = run_alone(values)
    assert out_T11.dtype == torch.float32
    torch.testing.assert_close(out_T11, wanted_T11.float())
