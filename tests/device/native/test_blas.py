"""The matrix products that compiled code calls are those of torch's and of numpy's library."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from mcore_rl.device import native
from mcore_rl.device.native import find_openblas, find_sgemm


@pytest.fixture
def fresh() -> Iterator[None]:
    find_openblas.cache_clear()
    yield
    find_openblas.cache_clear()


@pytest.mark.parametrize("find", [find_sgemm, find_openblas])
def test_it_multiplies(find: Callable[[], ctypes.c_void_p | None]) -> None:
    address = find()
    if address is None and find is find_openblas:
        pytest.skip("torch's library is the faster one here")
    assert address is not None
    sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(address.value or 0)
    x, w, y = torch.randn(3, 4), torch.randn(5, 4), torch.empty(3, 5)
    sizes = [ctypes.c_int(size) for size in (5, 3, 4)]
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    texts = [ctypes.create_string_buffer(text) for text in (b"T", b"N")]
    outputs, rows, inputs = map(ctypes.addressof, sizes)
    sgemm(
        *map(ctypes.addressof, texts),
        *(outputs, rows, inputs, ctypes.addressof(one)),
        *(w.data_ptr(), inputs, x.data_ptr(), inputs, ctypes.addressof(zero)),
        *(y.data_ptr(), outputs),
    )
    torch.testing.assert_close(y, x @ w.t())


@pytest.mark.usefixtures("fresh")
def test_mkl_is_kept_on_its_makers_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_is_intel", lambda: True)
    assert find_openblas() is None


@pytest.mark.usefixtures("fresh")
def test_numpy_may_have_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numpy, "__file__", str(tmp_path / "numpy" / "__init__.py"))
    assert find_openblas() is None
