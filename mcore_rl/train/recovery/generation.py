"""One copy of a rank's state in kept memory: whole, or not there at all.

    | header: step, lengths, digest | small values | tensor bytes ... |

The header is cleared before the first byte of a new copy is written, and written after the last.
So a rank that dies in between leaves no copy, and never a mixture of two.
"""

import json
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from mcore_rl.device import pin_in_place, synchronize
from mcore_rl.process.kept_memory import HEADER_BYTES, map_kept

SMALL_BYTES = 1 << 20
"""Room for what is no tensor of the model or its optimizer: generators, steps, learning rates."""
_TENSORS_START = HEADER_BYTES + SMALL_BYTES
_ALIGNED_BYTES = 64
_PART_BYTES = 64 << 20
MAX_THREADS = 4


class StateLostError(RuntimeError):
    """A copy is not there, or not the one that was written."""


@dataclass(frozen=True)
class _Header:
    """The contents of a copy: its bytes, and digests of the tensors' sizes and of all bytes."""

    step: int
    num_small: int
    num_bytes: int
    lengths: str
    digest: int

    @staticmethod
    def parse(content: bytes) -> "_Header | None":
        text = content.rstrip(b"\0")
        return _Header(**json.loads(text)) if text else None


class Generation:
    """Kept memory for one copy; its holder is another process."""

    def __init__(self, path: str) -> None:
        """Map the memory at `path`. Raises ValueError if it cannot be opened."""
        self.mapped = map_kept(path)
        self._bytes_B = torch.from_numpy(np.frombuffer(self.mapped, dtype=np.uint8))
        self._is_pinned = False

    @property
    def step(self) -> int | None:
        """The step whose state is here whole; None if there is none."""
        header = self._read_header()
        return None if header is None else header.step

    def write(self, step: int, small: bytes, tensors: Sequence[Tensor]) -> int:
        """Copy tensors of uint8 on any device and small values here; return how many bytes.

        Raises ValueError if there is no room for them.
        """
        self.clear()
        self._pin()
        places, end = place_tensors(tensors)
        if len(small) > SMALL_BYTES or end > len(self._bytes_B):
            raise ValueError(
                f"a rank's state has {len(small)} and {end} bytes, and there is room for"
                f" {SMALL_BYTES} and {len(self._bytes_B)}"
            )
        self.mapped[HEADER_BYTES : HEADER_BYTES + len(small)] = small
        for (start, stop), tensor in zip(places, tensors, strict=True):
            self._bytes_B[start:stop].copy_(tensor, non_blocking=True)
        synchronize()
        header = _Header(step, len(small), end, _describe(tensors), self._sum(len(small), end))
        content = json.dumps(vars(header)).encode()
        assert len(content) < HEADER_BYTES, content
        self.mapped[: len(content)] = content
        return end

    def read(self, step: int, tensors: Sequence[Tensor]) -> bytes:
        """Copy the state of `step` into `tensors`; return its small values.

        Raises StateLostError if the copy is another one, is damaged, or has other tensors.
        """
        header = self._read_header()
        if header is None or header.step != step:
            raise StateLostError(f"the state of step {step} is not in memory")
        if header.lengths != _describe(tensors):
            raise StateLostError(f"the state of step {step} in memory is one of other tensors")
        if header.digest != self._sum(header.num_small, header.num_bytes):
            raise StateLostError(f"the state of step {step} in memory is damaged: its digest")
        self._pin()
        places, _ = place_tensors(tensors)
        for (start, stop), tensor in zip(places, tensors, strict=True):
            tensor.copy_(self._bytes_B[start:stop], non_blocking=True)
        synchronize()
        return self.mapped[HEADER_BYTES : HEADER_BYTES + header.num_small]

    def _read_header(self) -> _Header | None:
        return _Header.parse(self.mapped[:HEADER_BYTES])

    def clear(self) -> None:
        """Forget the copy."""
        self.mapped[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def _pin(self) -> None:
        """Pin the memory at its first use, for copies from and to a GPU at full speed."""
        if not self._is_pinned:
            pin_in_place(self._bytes_B)
            self._is_pinned = True

    def _sum(self, num_small: int, end: int) -> int:
        """Return a digest of all bytes, which several threads compute part by part."""
        content = memoryview(self.mapped)
        parts = [content[HEADER_BYTES : HEADER_BYTES + num_small]]
        starts = range(_TENSORS_START, end, _PART_BYTES)
        parts += [content[k : min(k + _PART_BYTES, end)] for k in starts]
        with ThreadPoolExecutor(MAX_THREADS) as pool:
            digests = list(pool.map(xxh3_64_intdigest, parts))
        return xxh3_64_intdigest(np.array(digests, dtype=np.uint64).tobytes())


def count_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the size of the kept memory that a copy of these tensors of uint8 needs."""
    _, end = place_tensors(tensors)
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def place_tensors(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Return [start, stop) of each tensor's bytes, aligned, and where the last of them ends."""
    places = []
    end = _TENSORS_START
    for tensor in tensors:
        start = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        end = start + tensor.numel()
        places.append((start, end))
    return places, end


def _describe(tensors: Sequence[Tensor]) -> str:
    """Return a digest of the sizes of tensors, in their order."""
    sizes = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
    return f"{xxh3_64_intdigest(sizes.tobytes()):016x}"
