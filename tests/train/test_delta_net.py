"""A delta net's decay, the norm of its outputs, and what is said where its kernels are missing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import common

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.cpu.te_workalike import Norm
from mcore_rl.train.model import DeltaNet, PlainNorm
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.weights.hf.config import read_hf_config
from tests.support.policy import ROOT

WEIGHT = torch.tensor([0.5, -0.25, 2.0, 1.0])


def make_config() -> Any:
    return SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        params_dtype=torch.float32,
        sequence_parallel=False,
    )


def test_a_decay_is_computed_in_float32() -> None:
    logs = torch.tensor([0.3, 1.7, 2.6]).bfloat16()
    bias = torch.tensor([0.1, -0.4, 0.9]).bfloat16()
    alpha = torch.tensor([[[0.2, -1.1, 0.7]]]).bfloat16()
    beta = torch.tensor([[[0.5, 0.0, -2.0]]]).bfloat16()
    net: Any = DeltaNet.__new__(DeltaNet)
    decay, rate = net._compute_g_and_beta(logs, bias, alpha, beta)
    wanted = -logs.double().exp() * F.softplus(alpha.double() + bias.double())
    torch.testing.assert_close(decay.double(), wanted, rtol=1e-6, atol=0)
    assert torch.equal(rate, beta.sigmoid())


def test_the_norm_of_outputs_is_multiplied_with_its_weight_and_others_with_one_more() -> None:
    config = make_config()
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    normalized = x / (x.square().mean() + 1e-6).sqrt()
    for norm, factor in (
        (PlainNorm(Norm, config, 4, 1e-6), WEIGHT),
        (Norm(config, 4, 1e-6), 1.0 + WEIGHT),
    ):
        norm.weight.data.copy_(WEIGHT)  # type: ignore[operator]
        torch.testing.assert_close(norm(x), normalized * factor)
    assert config.layernorm_zero_centered_gamma


def test_a_rank_without_its_kernels_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_hf_config(ROOT / "recipes/model/qwen3_next_80b_a3b")
    monkeypatch.setattr(common, "HAVE_FLA", False)
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM has gated delta nets.* fla-core"):
        make_transformer_config(config, ParallelConfig(), torch.bfloat16, TrainConfig())
