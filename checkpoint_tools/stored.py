"""What a checkpoint on disk is made of, whatever its kind: tensors cut into chunks, stretches of files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from mcore_rl.slices.families.table import Shape
from mcore_rl.slices.hf.checksums import FileSums
from mcore_rl.slices.hf.dtypes import ITEMSIZE

DTYPES = (
    "float64",
    "int64",
    "float32",
    "int32",
    "bfloat16",
    "float16",
    "int16",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint8",
    "int8",
    "bool",
)
"""Torch names of the dtypes that the tools carry."""
DTYPE_BYTES: Mapping[str, int] = {dtype: ITEMSIZE[dtype] for dtype in DTYPES}


@dataclass(frozen=True)
class Chunk:
    """Elements from `offset` on, `shape` of them, of tensor `key`; contiguous in the file at `path`.

    start, num_bytes   the stretch of the file: the elements, or the archive of torch.save that holds them
    """

    key: str
    dtype: str
    offset: Shape
    shape: Shape
    path: str
    start: int
    num_bytes: int
    is_archive: bool

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def where(self) -> str:
        """For messages: file and tensor."""
        at = f" at {self.offset}" if any(self.offset) else ""
        return f"{self.path}: tensor {self.key!r}{at}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks make it up, each element once."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Item:
    """A stretch of a file that holds something other than a tensor, such as a generator's state."""

    key: str
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose structure was checked: files, sizes, and that chunks make up their tensors.

    sums    of checksums.json, if the checkpoint came with one
    facts   what was compared, for people
    """

    kind: Literal["hf", "torch_dist"]
    folder: Path
    tensors: Mapping[str, StoredTensor]
    items: tuple[Item, ...]
    sums: Mapping[str, FileSums] | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())
