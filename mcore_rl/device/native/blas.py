"""Finds the matrix product of torch's own BLAS library, which compiled code calls."""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


@cache
def find_sgemm() -> ctypes.c_void_p | None:
    """Return the address of sgemm_, or None if torch does not export it."""
    return _find("sgemm_")


@cache
def find_set_threads() -> ctypes.c_void_p | None:
    """Return the address of a function that sets how many threads this thread's products start.

    It returns how many it was, where 0 stands for torch's number. None: torch's BLAS is not MKL.
    """
    return _find("MKL_Set_Num_Threads_Local")


def _find(name: str) -> ctypes.c_void_p | None:
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", *sorted(folder.glob("libopenblas*"))):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(getattr(library, name), ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None
