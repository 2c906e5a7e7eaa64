"""The values that describe a checkpoint on disk, of either kind: tensors, chunks, objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from mcore_rl.weights.box import ITEMSIZE
from mcore_rl.weights.hf.checksums import FileSums
from mcore_rl.weights.models.table import Shape

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
"""torch's names of the dtypes that the tools can copy."""
DTYPE_BYTES: Mapping[str, int] = {dtype: ITEMSIZE[dtype] for dtype in DTYPES}


@dataclass(frozen=True)
class Chunk:
    """The box of tensor `key` at `offset`, of `shape`, contiguous in the file at `path`.

    start, num_bytes   bytes of the file: the elements, or the archive of torch.save around them
    scales             scales of the elements' groups, if they are stored as INT4 words; `dtype` is
                       then that of the scales (mcore_rl/weights/hf/int4.py)
    """

    key: str
    dtype: str
    offset: Shape
    shape: Shape
    path: str
    start: int
    num_bytes: int
    is_archive: bool
    scales: "Chunk | None" = None

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def where(self) -> str:
        """File, tensor and offset, for messages."""
        at = f" at {self.offset}" if any(self.offset) else ""
        return f"{self.path}: tensor {self.key!r}{at}"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks cover each element once."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Item:
    """Bytes of a file that hold an object other than a tensor, such as a generator's state."""

    key: str
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose structure was checked: files, sizes, and that chunks cover their tensors.

    sums    content of checksums.json, if there is one
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
