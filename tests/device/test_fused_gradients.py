"""Weights' gradients are added to their sums by the product that computes them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.device.fused_gradients import add_product

ENGINE = """
import torch
TOLD = []
def general_gemm(A, B, *, out_dtype, layout, out, grad, accumulate):
    # Transformer Engine counts in columns: NT of [T, K] and [T, N] is [N, K].
    assert layout == "NT" and grad and accumulate and out_dtype == out.dtype
    TOLD.append(tuple(out.shape))
    out += B.T.to(out_dtype) @ A.to(out_dtype)
"""
LAYER = """
import sys
import torch
from mcore_rl.device.setup import let_megatron_import
sys.path.insert(0, sys.argv[1])
let_megatron_import()
sys.path.remove(sys.argv[1])  # megatron-core would take more from Transformer Engine than this
from megatron.core.tensor_parallel import layers
sys.path.insert(0, sys.argv[1])
assert layers._grad_accum_fusion_available
from transformer_engine.pytorch.cpp_extensions import TOLD
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(3, 4))
weight.main_grad = torch.ones(3, 4)
inputs, wanted = torch.randn(5, 1, 4), torch.randn(5, 1, 3)
out = layers.linear_with_grad_accumulation_and_async_allreduce(
    inputs, weight, None, True, False, False
)
(out * wanted).sum().backward()
product = torch.einsum("tbn,tbk->nk", wanted, inputs)
torch.testing.assert_close(weight.main_grad, 1 + product)
assert TOLD == [(3, 4)] and weight.grad is None
"""


def test_megatrons_layers_add_their_gradients_by_it(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine/pytorch/cpp_extensions"
    package.mkdir(parents=True)
    for folder in (package.parents[1], package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text(ENGINE)
    command = [sys.executable, "-c", LAYER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_added_in_float32(dtype: torch.dtype) -> None:
    inputs_TK = torch.randn(64, 48, device="cuda", dtype=dtype)
    grad_TN = torch.randn(64, 32, device="cuda", dtype=dtype)
    sum_NK = torch.ones(32, 48, device="cuda")
    add_product(inputs_TK, grad_TN, sum_NK)
    wanted = 1 + grad_TN.double().T @ inputs_TK.double()
    torch.testing.assert_close(sum_NK.double(), wanted, rtol=1e-3, atol=1e-2)
