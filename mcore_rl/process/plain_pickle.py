"""Reads pickles of this package's own values, and nothing that could run code.

A pickle may name any function of any module, and loading calls it. These readers take only
dataclasses and enums of this package, and arrays of numpy.
"""

import importlib
import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
_ARRAYS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS:
            return super().find_class(module, name)
        if module.split(".")[0] == PACKAGE and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            is_plain = is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum))
            if isinstance(found, type) and is_plain and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain value")


def load_plain(data: bytes, path: Path) -> Any:
    """Return the value of a pickle that `path` had; its dataclasses are made without __init__.

    Raises ValueError naming `path` if the pickle is damaged or names what is no plain value.
    """
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise whatever their last instruction does
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged or not of this version: {reason}") from error
