"""The .metadata file of torch.distributed.checkpoint in, plain records out; the file cannot run code.

Every class it may name becomes an inert record, any other name is refused.
"""

import io
import pickle
import re
from collections import OrderedDict
from typing import Any

from checkpoint_tools.archive import READ_ERRORS

_RECORDS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
_PLAIN = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
}


class Record:
    """Stands for an object of a class that is not imported: its state or arguments, by name where it has
    names.
    """

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state)

    def get(self, name: str) -> Any:
        """The attribute; ValueError if the file gives none."""
        if name not in self.__dict__:
            raise ValueError(f"a {type(self).__name__} lacks {name!r}")
        return self.__dict__[name]


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and re.fullmatch(r"(u?int|float|bfloat|complex)[\w]+|bool", name):
            return name
        is_path = module in ("pathlib", "pathlib._local") and name in (
            "Path",
            "PosixPath",
            "PurePosixPath",
        )
        if is_path or f"{module}.".startswith(_RECORDS):
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint needs: not loaded"
        )


def read_metadata(content: bytes, path: object) -> Record:
    """The Metadata object; ValueError names `path` if it is damaged or names foreign code."""
    try:
        metadata = _Reader(io.BytesIO(content)).load()
        if type(metadata).__name__ not in ("Metadata", "MCoreMetadata"):
            raise ValueError(f"it holds a {type(metadata).__name__}, not a Metadata")
        return metadata
    except READ_ERRORS as error:
        raise ValueError(
            f"{path} is damaged or not of torch.distributed.checkpoint: {error or type(error).__name__}"
        ) from error
