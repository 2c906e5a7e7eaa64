"""The Triton kernel merges factors to torch's bits; its compiler joins no product with a sum.

The interpreter does not round to bfloat16 as a GPU does (Triton 3.6), so W is float32 here.
"""

from tests.support.triton_code import needs_triton, run_with_triton

INTERPRET = """
import torch
from mcore_rl.device.gpu_kernels import add_low_rank
from mcore_rl.weights.lora.product import add_by_torch

torch.manual_seed(0)
for rows, columns, rank in [(32, 128, 1), (33, 129, 7), (1, 1, 3), (70, 260, 16)]:
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(rows + 2, columns)
        weight[1] = -0.0
        a, b = torch.randn(columns, rank).to(dtype).t(), torch.randn(rows, rank).to(dtype)
        b[0] = 0.0
        wanted = weight.clone()
        add_by_torch(wanted[1:-1], a, b, 0.3)
        add_low_rank(weight[1:-1], a, b, 0.3)
        assert torch.equal(weight.view(torch.int32), wanted.view(torch.int32)), (rows, rank, dtype)
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import add_low_rank

constants = {"ROWS": 32, "COLUMNS": 128}
kinds = {name: "*bf16" for name in ("weight", "first", "second")}
kinds |= {"scale": "fp32", **dict.fromkeys(constants, "constexpr")}
signature = {name: kinds.get(name, "i32") for name in add_low_rank.arg_names}
source = ASTSource(fn=add_low_rank, signature=signature, constexprs=constants)
for fused in (True, False):
    options = {"enable_fp_fusion": fused}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ("fma.rn.f32" in compiled.asm["ptx"]) == fused
"""


@needs_triton
def test_the_kernel_computes_what_torch_does() -> None:
    run_with_triton(INTERPRET, TRITON_INTERPRET="1")


@needs_triton
def test_the_compiled_kernel_rounds_each_operation() -> None:
    run_with_triton(COMPILE)
