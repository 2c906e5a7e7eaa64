"""Finds the matrix product of torch's own BLAS library, which compiled code calls."""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def find_sgemm() -> ctypes.c_void_p | None:
    """Return the address of sgemm_, or None if torch does not export it."""
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", *sorted(folder.glob("libopenblas*"))):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.sgemm_, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None
