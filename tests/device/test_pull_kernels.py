"""Slices are read, summed and written exactly, from any byte on; the kernels compile for Hopper."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.device.gpu_kernels import CHUNK_WORDS, DENSE_WORDS
from mcore_rl.device.pull_kernels import PullRows, cut_rows
from tests.support.triton_code import needs_triton, run_with_triton

SHORT = st.tuples(st.integers(1, 5), st.integers(1, 70))
WORDS = st.tuples(st.integers(1, 3), st.integers(100, 400).map(lambda words: 8 * words))
LONG = st.tuples(st.just(1), st.integers(8 * DENSE_WORDS - 40, 8 * DENSE_WORDS + 40))


@given(
    sizes=st.one_of(SHORT, WORDS, LONG),
    gaps=st.tuples(*[st.sampled_from((0, 0, 1, 8, 24))] * 3),
    begins=st.tuples(*[st.integers(0, 40)] * 3),
    copying=st.booleans(),
)
def test_chunks_hold_each_byte_once(
    sizes: tuple[int, int],
    gaps: tuple[int, int, int],
    begins: tuple[int, int, int],
    copying: bool,
) -> None:
    num_rows, row_bytes = sizes
    source_stride, target_stride, stride = (row_bytes + gap for gap in gaps)
    source, target, at = begins[0], 10_000_000 + begins[1] if copying else 0, begins[2]
    rows = PullRows(
        3, source, source_stride, target, target_stride, at, stride, num_rows, row_bytes, 7
    )
    found = set()
    for unit, most, chunks in zip(
        (1, 8, 8), (CHUNK_WORDS, CHUNK_WORDS, DENSE_WORDS), cut_rows([rows]), strict=True
    ):
        for chunk in chunks:
            assert (chunk.storage, chunk.number) == (3, 7)
            width, num_units = chunk.num_rows, chunk.row_bytes
            assert 0 < num_units <= most
            if most == DENSE_WORDS:
                assert chunk.source % 16 == chunk.target % 16 == num_units % 2 == 0
                assert width == num_units, "the kernel of dense rows has one row"
            for i in range(num_units):
                row, column = divmod(i, width)
                own = unit * (row * chunk.source_stride + column)
                place = unit * (row * chunk.target_stride + column)
                in_slice = unit * (chunk.at + row * chunk.stride + column)
                where = chunk.source + own, chunk.target + place if copying else 0, in_slice, unit
                assert where not in found
                found.add(where)
    bytes_found = {
        (own + i, place + i if copying else 0, in_slice + i)
        for own, place, in_slice, unit in found
        for i in range(unit)
    }
    assert bytes_found == {
        (
            source + row * source_stride + i,
            target + row * target_stride + i if copying else 0,
            at + row * stride + i,
        )
        for row in range(num_rows)
        for i in range(row_bytes)
    }


EXACT = """
import numpy as np, torch
from mcore_rl.device.gpu_kernels import DENSE_WORDS
from mcore_rl.device.pull_kernels import PullRows, PullTable
from mcore_rl.weight_sync.verify import ROW_WORDS, make_row_multipliers

multipliers_W = make_row_multipliers(torch.device("cpu"))
for num_rows, row_bytes, gap, odd in [
    (1, 8 * (DENSE_WORDS + 501), 0, 0),
    (1, 8 * (DENSE_WORDS + 501), 0, 8),  # no pairs of words on both sides
    (1, 8 * 301, 0, 0),
    (7, 240, 16, 0),
    (7, 30, 0, 0),  # five elements of a head whose rows begin within a word
    (3, 30, 6, 2),
    (2, 8 * 5000, 8, 0),
]:
    torch.manual_seed(0)
    size = num_rows * (row_bytes + gap) + 64
    storages = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(2)]
    target = torch.full((size,), 9, dtype=torch.uint8)
    first = (-target.data_ptr()) % 16 + odd
    rows = PullRows(
        1, 16, row_bytes + gap, target.data_ptr() + first, row_bytes, 0, row_bytes,
        num_rows, row_bytes, 1,
    )
    bases = [each.data_ptr() for each in storages]
    (begin,) = [(-base) % 16 for base in bases[1:]]
    bases[1] += begin
    wanted = storages[1][begin + 16 :][: num_rows * (row_bytes + gap)]
    wanted = wanted.view(num_rows, -1)[:, :row_bytes].reshape(-1)
    slice_B = np.zeros(-(-len(wanted) // 576) * 576, np.uint8)
    slice_B[: len(wanted)] = wanted
    words_W = torch.from_numpy(slice_B.view(np.int64))
    total = (words_W.view(-1, ROW_WORDS).sum(0) * multipliers_W).sum()
    summed = PullTable([rows._replace(target=0)], 2, multipliers_W, copying=False)
    assert summed.run(bases).tolist() == [0, int(total)], (num_rows, row_bytes)
    assert (target == 9).all()
    pulled = PullTable([rows], 2, multipliers_W, copying=True)
    assert pulled.run(bases).tolist() == [0, int(total)], (num_rows, row_bytes)
    assert torch.equal(target[first:][: len(wanted)], wanted)
    assert (target[:first] == 9).all() and (target[first + len(wanted) :] == 9).all()
"""

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mcore_rl.device.triton_kernels import pull_dense, pull_rows

shared = {"ROW_WORDS": 72, "FIELDS": 10}
several = {**shared, "MOST_UNITS": 8192, "BLOCK": 1024}
dense = {**shared, "STEPS": 8, "LANES": 128, "PARTS": 9}
for kernel, sizes in [
    (pull_rows, {**several, "UNIT_BYTES": 8}),
    (pull_rows, {**several, "UNIT_BYTES": 1}),
    (pull_dense, dense),
]:
    for copying in (False, True):
        consts = {**sizes, "COPYING": copying}
        signature = {n: "constexpr" if n in consts else "*i64" for n in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
        source = ASTSource(fn=kernel, signature=signature, constexprs=consts, attrs=aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "atom.global" in ptx
        assert ("st.global" in ptx) == copying
        if kernel is pull_dense:
            assert len(re.findall(r"ld[.]global[.]v2[.]b64", ptx)) == 9 * 4
            assert len(re.findall(r"st[.]global[.]v2[.]b64", ptx)) == 9 * 4 * copying
            assert not re.findall(r"\\bdiv[.]|\\brem[.]", ptx), "words' rows are divided"
"""


@needs_triton
def test_bytes_arrive_exactly_with_the_sums_of_whole_words() -> None:
    run_with_triton(EXACT, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_compile_for_hopper() -> None:
    run_with_triton(COMPILE)
