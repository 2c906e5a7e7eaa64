"""The Triton kernel computes what torch does; Triton's interpreter and compiler need no GPU.

The interpreter's cast to 8 bits is wrong where rounding carries into the exponent (Triton 3.6), so
the values are compared before that cast, which is one instruction on a GPU.
"""

from tests.support.triton_code import needs_triton, run_with_triton

INTERPRET = """
import torch
from mcore_rl.device.gpu_kernels import quantize_blocks
from mcore_rl.weights.hf.quantize import _FP8_MAX, _MIN_AMAX, quantize_into

torch.manual_seed(0)
for shape in [(128, 128), (300, 129), (256, 384), (1, 1), (576, 200)]:
    for dtype in (torch.bfloat16, torch.float32):
        weights = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
        if shape == (300, 129):
            weights[3, 5] = float("nan")
            weights[200, 128] = float("inf")
            weights[:128, 128:] = 0
        if shape == (256, 384):
            weights = weights.t().contiguous().t()
        n, k = -(-shape[0] // 128), -(-shape[1] // 128)
        wanted, scales = torch.empty(shape), torch.empty(n, k)
        quantize_into(weights, wanted, scales)
        got, own = torch.empty(shape), torch.empty(2 * n, k)[::2]
        quantize_blocks(weights, got, own, 128, _FP8_MAX, _MIN_AMAX)
        torch.testing.assert_close(own, scales, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
"""
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import quantize

pointers = {"weights": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
numbers = {"fp8_max": "fp32", "min_amax": "fp32", "BLOCK": "constexpr"}
signature = {name: (pointers | numbers).get(name, "i32") for name in quantize.arg_names}
source = ASTSource(fn=quantize, signature=signature, constexprs={"BLOCK": 128})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
"""


@needs_triton
def test_the_kernel_computes_what_torch_does() -> None:
    run_with_triton(INTERPRET, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernel_compiles_for_hopper() -> None:
    run_with_triton(COMPILE)
