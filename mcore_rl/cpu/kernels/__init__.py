"""Parts of a layer in compiled code, for training ranks on a CPU.

Each takes the place of a fused kernel of Transformer Engine. torch's own operations for it make a
pass over memory each, and take more time than a small model's matrix products. Without a C
compiler and in other precisions, torch's operations do the same.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device.native import find_sgemm, load


@cache
def library(name: str) -> ctypes.CDLL | None:
    """Return the compiled code of native/`name`.c, or None if this machine has no compiler."""
    return load(name) if find_sgemm() is not None else None


@cache
def is_parallel() -> bool:
    """Return whether compiled code runs on as many threads as torch."""
    compiled = library("layers")
    return compiled is not None and bool(compiled.is_parallel())


def usable(*tensors: Tensor) -> bool:
    """Return whether compiled code takes these tensors: float32 on a CPU."""
    if library("layers") is None or (torch.get_num_threads() > 1 and not is_parallel()):
        return False
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def call(name: str, function: str, *arguments: Any) -> None:
    """Call a function of native/`name`.c.

    It gets tensors and structures by their addresses, integers as int64 and floats as float32.
    """
    compiled = library(name)
    assert compiled is not None, f"native/{name}.c was not compiled"
    getattr(compiled, function)(*map(_as_c, arguments))


def _as_c(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int64(value) if isinstance(value, int) else value
