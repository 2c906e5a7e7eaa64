"""The product of a few rows agrees with torch's, with the vector registers of any processor."""

import ctypes
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mcore_rl.device.native as native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
SOURCE = """
#include "few_rows.h"
int takes(int64_t rows, int64_t part) { return takes_few_rows(rows, part); }
void run(int64_t rows, int64_t outputs, int64_t inputs, const float *x, const float *w, float *y,
         float beta, int64_t first, int64_t last, int has_other_rows) {
    static packed_t packed;
    if (has_other_rows) packed.x = 0;
    few_rows(rows, outputs, inputs, x, w, y, beta, first, last, &packed);
}
"""
NARROWER = {"as here": [], "avx2": ["-mno-avx512f"], "sse": ["-mno-avx512f", "-mno-avx2"]}


@pytest.fixture(scope="module", params=NARROWER)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("few_rows")
    (folder / "run.c").write_text(SOURCE)
    headers = str(Path(native.__file__).parent)
    command = ["cc", *native.FLAGS, *NARROWER[request.param], "-Wall", "-Werror", "-I", headers]
    done = subprocess.run(
        [*command, str(folder / "run.c"), "-o", str(folder / "run.so")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized command-line option" in done.stderr:
        pytest.skip("flags of another processor")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "run.so"))


def run(
    library: ctypes.CDLL,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    beta: float,
    first: int,
    last: int,
    *,
    has_other_rows: bool = True,
) -> None:
    """Call few_rows; `has_other_rows` is False if x has the rows of the call before."""
    sizes = (ctypes.c_int64(n) for n in (*y.shape, x.shape[1]))
    tensors = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, w, y))
    library.run(
        *sizes, *tensors, ctypes.c_float(beta), *map(ctypes.c_int64, (first, last)), has_other_rows
    )


def test_rows_of_any_number(library: ctypes.CDLL) -> None:
    for rows, inputs in product([*range(1, 14), 17, 24, 25, 33, 48, 49, 63, 64], [1, 48, 2050]):
        torch.manual_seed(rows)
        x, w = torch.randn(rows, inputs), torch.randn(20, inputs)
        y = torch.full((rows, 20), torch.nan)
        run(library, x, w, y, 0.0, 0, 20)
        expected = (x.double() @ w.double().t()).float()
        assert torch.allclose(y, expected, atol=1e-4), (rows, inputs)


def test_a_row_has_the_same_bits_whatever_is_computed_with_it(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 300), torch.randn(28, 300)
    whole = torch.empty(64, 28)
    run(library, x, w, whole, 0.0, 0, 28)
    for rows in range(1, 64):
        y = torch.full((rows, 28), torch.nan)
        own = x[:rows].contiguous()
        for first in range(0, 28, 4):
            run(library, own, w, y, 0.0, first, first + 4, has_other_rows=first == 0)
        assert torch.equal(y, whole[:rows]), rows


@pytest.mark.parametrize("inputs", [1024, 2050])
def test_rows_of_the_call_before_are_known_by_place_and_sizes(
    library: ctypes.CDLL, inputs: int
) -> None:
    """Fewer rows at the same place, and rows too long to be kept, are put in order anew."""
    torch.manual_seed(0)
    x, w = torch.randn(9, inputs), torch.randn(8, inputs)
    for rows in (9, 5, 5):
        y = torch.full((rows, 8), torch.nan)
        run(library, x, w, y, 0.0, 0, 8, has_other_rows=rows == 9)
        assert torch.allclose(y, x[:rows] @ w.t(), atol=1e-3)


def test_a_part_of_the_outputs_is_added_and_others_stay(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    x, w, before = torch.randn(7, 32), torch.randn(21, 32), torch.randn(7, 21)
    y = before.clone()
    run(library, x, w, y, 1.0, 5, 17)
    expected = before.clone()
    expected[:, 5:17] += (x @ w.t())[:, 5:17]
    assert torch.allclose(y, expected, atol=1e-4)
    assert torch.equal(y[:, :5], before[:, :5]) and torch.equal(y[:, 17:], before[:, 17:])


def test_others_are_left_to_a_library(library: ctypes.CDLL) -> None:
    sizes = ((64, 4), (65, 4), (1, 6))
    assert [library.takes(*map(ctypes.c_int64, size)) for size in sizes] == [1, 0, 0]
