"""The Triton kernels that copy and sum compile for Hopper, and move rows from any word on.

tests/weight_sync/test_gpu_pass.py has Triton's interpreter move whole buckets.
"""

from tests.support.triton_code import needs_triton, run_with_triton

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import copy_and_sum, copy_and_sum_dense

shared = {"ROW_WORDS": 72, "FIELDS": 7}
several = {**shared, "MOST_WORDS": 8192, "BLOCK": 1024}
dense = {**shared, "STEPS": 8, "LANES": 128, "PARTS": 9}
for kernel, sizes in [(copy_and_sum, several), (copy_and_sum_dense, dense)]:
    for placing in (False, True):
        for copying in (False, True):
            consts = {**sizes, "PLACING": placing, "COPYING": copying}
            types = {name: "constexpr" for name in consts} | {"version": "i32", "index": "i32"}
            signature = {name: types.get(name, "*i64") for name in kernel.arg_names}
            # Triton finds at each launch that torch's memory begins at multiples of 16 bytes.
            aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
            source = ASTSource(fn=kernel, signature=signature, constexprs=consts, attrs=aligned)
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
            assert "atom.global" in ptx
            assert ("st.global" in ptx) == copying
            pairs = len(re.findall(r"ld[.]global[.]v2[.]b64", ptx))
            stored = len(re.findall(r"st[.]global[.]v2[.]b64", ptx))
            assert (stored > 0) == (copying and kernel is copy_and_sum_dense)
            if kernel is copy_and_sum_dense:
                # A thread moves 8 words of each of 9 parts.
                assert pairs == 9 * 4, pairs
                assert stored == (9 * 4 if copying else 0), stored
                assert not re.findall(r"\\bdiv[.]|\\brem[.]", ptx), "words' rows are divided"
"""


ROWS = """
import torch
from mcore_rl.device.gpu_kernels import DENSE_WORDS, ChunkTable
from mcore_rl.weight_sync.verify import ROW_WORDS, make_row_multipliers

NUM_WORDS = DENSE_WORDS + 501
multipliers_W = make_row_multipliers(torch.device("cpu"))
for begin, odd in ((0, 0), (1, 1), (1, 0), (0, 1)):
    torch.manual_seed(0)
    memory_W = torch.randint(-(2**62), 2**62, (NUM_WORDS + 4,))
    first = begin + memory_W.data_ptr() // 8 % 2
    own_W, before_W = memory_W[first:][:NUM_WORDS], memory_W.clone()
    words_W = torch.zeros(ROW_WORDS * (NUM_WORDS // ROW_WORDS + 3), dtype=torch.int64)
    words_W[0], words_W[1], at = 3, 5, ROW_WORDS + odd
    run = own_W.data_ptr(), 8 * NUM_WORDS, 8 * at, 8 * NUM_WORDS, 1, 8 * NUM_WORDS, 0
    table = ChunkTable(words_W, [run], multipliers_W, copying=True)
    places_W = torch.arange(at, at + NUM_WORDS)
    wanted_P = (own_W * multipliers_W[places_W % ROW_WORDS]).sum()[None]
    sums_P, received_P = torch.zeros(2, 1, dtype=torch.int64)
    table.pack(sums_P)
    assert torch.equal(words_W[places_W], own_W) and torch.equal(sums_P, wanted_P)
    assert not words_W[2:at].any() and not words_W[at + NUM_WORDS :].any()
    own_W.zero_()
    table.place(received_P, 4, 5)
    assert not own_W.any() and not received_P.any(), "another version was placed"
    table.place(received_P, 3, 5)
    assert torch.equal(memory_W, before_W) and torch.equal(received_P, wanted_P)
"""


@needs_triton
def test_rows_that_begin_anywhere_are_moved_word_by_word() -> None:
    run_with_triton(ROWS, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_compile_for_hopper() -> None:
    run_with_triton(COMPILE)
