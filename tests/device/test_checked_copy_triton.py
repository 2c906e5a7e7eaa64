"""The Triton kernel that copies and sums compiles for Hopper, without a GPU.

tests/weight_sync/test_gpu_pass.py has Triton's interpreter run it.
"""

from tests.support.triton_code import needs_triton, run_with_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import copy_and_sum

constants = {"ROW_WORDS": 72, "FIELDS": 7, "MOST_WORDS": 8192, "BLOCK": 1024}
for placing in (False, True):
    for copying in (False, True):
        consts = {**constants, "PLACING": placing, "COPYING": copying}
        types = {name: "constexpr" for name in consts} | {"version": "i32", "index": "i32"}
        signature = {name: types.get(name, "*i64") for name in copy_and_sum.arg_names}
        source = ASTSource(fn=copy_and_sum, signature=signature, constexprs=consts)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "atom.global" in ptx
        assert ("st.global" in ptx) == copying
"""


@needs_triton
def test_the_kernel_compiles_for_hopper() -> None:
    run_with_triton(COMPILE)
