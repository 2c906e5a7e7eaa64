"""The matrix product that compiled code calls is torch's own."""

import ctypes

import torch

from mcore_rl.device.native.blas import find_sgemm


def test_it_multiplies() -> None:
    address = find_sgemm()
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
