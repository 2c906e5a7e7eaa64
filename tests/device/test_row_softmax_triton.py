"""The kernels of the softmax compute what torch does, in Triton's interpreter, and compile."""

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.device.row_softmax import sum_rows
from tests.support.triton_code import needs_triton, run_with_triton

INTERPRET = """
import torch
from mcore_rl.device import row_softmax
row_softmax._BLOCK = 64
from mcore_rl.device.row_softmax import differentiate_rows, sum_rows

torch.manual_seed(0)
for num_columns, num_real, temperature, dtype in [
    (300, 300, 1.0, torch.bfloat16), (304, 297, 0.7, torch.float32), (64, 1, 1.3, torch.bfloat16),
    (64, 0, 1.0, torch.float32),
]:
    wide = (torch.randn(5, num_columns + 3) * 4).to(dtype)
    logits = wide[:, :num_columns]
    logits[1, num_real:] = float("inf")
    if num_real > 100:
        logits[2] = -80.0
        logits[2, 99] = 60.0
    columns = torch.tensor([0, max(num_real - 1, 0), min(99, num_columns - 1), -1, 5])
    columns = torch.where(columns < num_real, columns, -1)
    peak, target, total, weighted, squares = sum_rows(
        logits, columns, num_real, temperature, squares=True
    )
    real = logits[:, :num_real].double()
    wanted_peak = real.amax(-1) if num_real else torch.full((5,), -1e30)
    x = (real - wanted_peak[:, None].double()) / temperature
    close = dict(rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(peak, wanted_peak.float(), rtol=0, atol=0)
    own = logits.double().gather(1, columns.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(target[columns >= 0], own.float()[columns >= 0], rtol=0, atol=0)
    torch.testing.assert_close(total, x.exp().sum(-1).float(), **close)
    torch.testing.assert_close(weighted, (x * x.exp()).sum(-1).float(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(squares, (2 * x).exp().sum(-1).float(), **close)
    four = sum_rows(logits, columns, num_real, temperature, squares=False)
    assert torch.equal(four, torch.stack([peak, target, total, weighted]))

    if not num_real:
        continue
    log_total = total.log()
    entropy = log_total - weighted / total
    by_logprob, by_entropy = torch.randn(2, 5)
    got = differentiate_rows(
        logits, columns, num_real, temperature, (peak, log_total, entropy), by_logprob, by_entropy
    )
    inputs = real.clone().requires_grad_()
    log_p = (inputs / temperature).log_softmax(-1)
    has = columns >= 0
    logprob = log_p.gather(1, columns.clamp(min=0)[:, None])[:, 0]
    # A target elsewhere counts by what it takes from all columns here.
    logprob = torch.where(has, logprob, -(inputs / temperature).logsumexp(-1))
    loss = (logprob * by_logprob).sum() - ((log_p.exp() * log_p).sum(-1) * by_entropy).sum()
    [wanted] = torch.autograd.grad(loss, inputs)
    assert got.dtype == dtype and got.is_contiguous()
    assert not got[:, num_real:].any()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got[:, :num_real].double(), wanted, rtol=tolerance, atol=1e-5)
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import differentiate_rows, sum_rows

floats = "sums peaks log_totals entropies grads_logprob grads_entropy".split()
kinds = {"logits": "*bf16", "grads": "*bf16", "columns": "*i64", "temperature": "fp32"}
kinds |= dict.fromkeys(floats, "*fp32")
constants_of = {sum_rows: {"SQUARES": True, "BLOCK": 4096}, differentiate_rows: {"BLOCK": 4096}}
for kernel, constants in constants_of.items():
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ld.global" in compiled.asm["ptx"]
"""


@needs_triton
def test_the_kernels_compute_what_torch_does() -> None:
    run_with_triton(INTERPRET, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_compile_for_hopper() -> None:
    run_with_triton(COMPILE)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_sums_of_a_whole_vocabulary_on_a_gpu() -> None:
    logits_TV = torch.randn(64, 151_936, device="cuda", dtype=torch.bfloat16) * 3
    columns_T = torch.arange(64, device="cuda") * 2_000
    peak_T, target_T, total_T, weighted_T = sum_rows(
        logits_TV, columns_T, 151_900, 1.0, squares=False
    )
    x_TV = logits_TV[:, :151_900].double()
    log_p_TV = x_TV.log_softmax(-1)
    wanted_T = log_p_TV.gather(1, columns_T[:, None])[:, 0]
    logprob_T = target_T - peak_T - total_T.log()
    torch.testing.assert_close(logprob_T.double(), wanted_T, rtol=0, atol=1e-5)
    entropy_T = total_T.log() - weighted_T / total_T
    wanted_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    torch.testing.assert_close(entropy_T.double(), wanted_T, rtol=0, atol=1e-4)
