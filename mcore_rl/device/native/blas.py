"""Finds the matrix products that compiled code calls: those of torch's library and of numpy's."""

import ctypes
import os
from functools import cache
from pathlib import Path

import numpy
import torch

from mcore_rl.device.native import load


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


@cache
def find_openblas() -> ctypes.c_void_p | None:
    """Return the address of sgemm_ in numpy's OpenBLAS, whose calls take one thread from now on.

    It is the faster library for large matrices where torch has MKL and the processor is not of
    MKL's maker. None: elsewhere, without a C compiler, or if numpy has another library.
    """
    adapter = None if find_set_threads() is None or _is_intel() else load("openblas")
    if adapter is None:
        return None
    folder = Path(numpy.__file__).parent.parent / "numpy.libs"
    for path in sorted(folder.glob("libscipy_openblas64_*")):
        library = ctypes.CDLL(str(path))
        try:
            library.scipy_openblas_set_num_threads64_(1)
            wide = ctypes.cast(library.scipy_sgemm_64_, ctypes.c_void_p)
        except AttributeError:
            continue
        adapter.take(wide)
        return ctypes.cast(adapter.sgemm, ctypes.c_void_p)
    return None


def _find(name: str) -> ctypes.c_void_p | None:
    folder = Path(torch.__file__).parent / "lib"
    for path in (folder / "libtorch_cpu.so", *sorted(folder.glob("libopenblas*"))):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(getattr(library, name), ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def _is_intel() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text()
