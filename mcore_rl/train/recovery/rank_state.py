"""Copies what a rank would lose with its process to kept memory, and back.

kept                                              made again
main weights, moments, frozen weights, buffers    gradients, weights in bfloat16
optimizer steps, learning rates, generators       the reference (from model.path)
                                                  all weights below low-rank factors (likewise)

Two generations alternate, so that a rank that dies within a copy has the one before:

    | header: step, lengths, digest | small values | tensor bytes ... | index |

The header is cleared before the first byte of a new copy is written, and written after the last.
So a rank that dies in between leaves no copy, and never a mixture of two. By the index
(process/kept_copies.py) ranks of another layout compose their copies of those of earlier ranks.
"""

import io
import mmap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from xxhash import xxh3_64_intdigest

from mcore_rl.device import default_generators, pin_in_place, synchronize
from mcore_rl.process.kept_copies import (
    Header,
    Span,
    decode_index,
    encode_index,
    plan_reads,
)
from mcore_rl.process.kept_memory import HEADER_BYTES, map_kept
from mcore_rl.train.checkpoint_check import load_safely
from mcore_rl.train.lora.turns import Turns
from mcore_rl.train.offload import DeviceMemory, list_optimizer_tensors
from mcore_rl.train.optimizer import parts_of
from mcore_rl.train.recovery.spans import check_named, list_spans
from mcore_rl.train.runtime import rng_state, set_rng_state

SMALL_BYTES = 1 << 20
"""Room for what is no tensor of the model or its optimizer: generators, steps, learning rates."""
_TENSORS_START = HEADER_BYTES + SMALL_BYTES
_ALIGNED_BYTES = 64
_PART_BYTES = 64 << 20
MAX_THREADS = 4


class StateLostError(RuntimeError):
    """A copy is not there, or not the one that was written."""


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

    def write(self, step: int, small: bytes, tensors: Sequence[Tensor], index: bytes) -> int:
        """Copy tensors of uint8 on any device, small values and their index here; return the bytes.

        Raises ValueError if there is no room for them.
        """
        self.clear()
        self._pin()
        places, end = self._place(tensors, index)
        if len(small) > SMALL_BYTES or end > len(self._bytes_B):
            raise ValueError(
                f"a rank's state has {len(small)} and {end} bytes, and there is room for"
                f" {SMALL_BYTES} and {len(self._bytes_B)}"
            )
        self.mapped[HEADER_BYTES : HEADER_BYTES + len(small)] = small
        for (start, stop), tensor in zip(places, tensors, strict=True):
            self._bytes_B[start:stop].copy_(tensor, non_blocking=True)
        synchronize()
        self._complete(step, len(small), tensors, index)
        return end

    def compose(
        self,
        step: int,
        tensors: Sequence[Tensor],
        index: bytes,
        sources: Mapping[str, "Generation"],
        like: str,
    ) -> None:
        """Make the copy that `write` would make of the state of `step`, of other ranks' copies.

        sources   copies of the step by rank; what several of them have is taken from the first
        like      the rank whose small values are taken
        Raises StateLostError if a source is another copy or is damaged.
        """
        self.clear()
        self._pin()
        headers = {name: source.check(step) for name, source in sources.items()}
        held = {name: source.read_index() for name, source in sources.items()}
        for read in plan_reads(decode_index(index), held):
            bytes_B = sources[read.source]._bytes_B[read.start : read.start + read.num_bytes]
            self._bytes_B[read.place : read.place + read.num_bytes].copy_(bytes_B)
        num_small = headers[like].num_small
        end = HEADER_BYTES + num_small
        self.mapped[HEADER_BYTES:end] = sources[like].mapped[HEADER_BYTES:end]
        self._complete(step, num_small, tensors, index)

    def read(self, step: int, tensors: Sequence[Tensor]) -> bytes:
        """Copy the state of `step` into `tensors`; return its small values.

        Raises StateLostError if the copy is another one, is damaged, or has other tensors.
        """
        header = self.check(step)
        if header.lengths != _describe(tensors):
            raise StateLostError(f"the state of step {step} in memory is one of other tensors")
        self._pin()
        places, _ = place_tensors(tensors)
        for (start, stop), tensor in zip(places, tensors, strict=True):
            tensor.copy_(self._bytes_B[start:stop], non_blocking=True)
        synchronize()
        return self.mapped[HEADER_BYTES : HEADER_BYTES + header.num_small]

    def check(self, step: int) -> Header:
        """Return the header. Raises StateLostError if the copy is another one, or is damaged."""
        header = self._read_header()
        if header is None or header.step != step:
            raise StateLostError(f"the state of step {step} is not in memory")
        if header.digest != self._sum(header.num_small, header.num_bytes):
            raise StateLostError(f"the state of step {step} in memory is damaged: its digest")
        return header

    def read_index(self) -> list[Span]:
        """Return the spans of the copy, which must be whole."""
        header = self._read_header()
        assert header is not None, "there is no copy"
        return decode_index(self.mapped[header.index : header.num_bytes])

    def _complete(self, step: int, num_small: int, tensors: Sequence[Tensor], index: bytes) -> None:
        """Write the index, and the header: from now on the copy counts."""
        _, end = self._place(tensors, index)
        start = end - len(index)
        self.mapped[start:end] = index
        digest = self._sum(num_small, end)
        content = Header(step, num_small, end, _describe(tensors), digest, start).encode()
        self.mapped[: len(content)] = content

    @staticmethod
    def _place(tensors: Sequence[Tensor], index: bytes) -> tuple[list[tuple[int, int]], int]:
        """Return the places of tensors, and where the index behind them ends."""
        places, end = place_tensors(tensors)
        return places, end + len(index)

    def _read_header(self) -> Header | None:
        return Header.parse(self.mapped[:HEADER_BYTES])

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


def count_bytes(tensors: Sequence[Tensor], index: bytes) -> int:
    """Return the size of the kept memory that a copy of these tensors of uint8 needs."""
    _, end = place_tensors(tensors)
    return -(-(end + len(index)) // mmap.PAGESIZE) * mmap.PAGESIZE


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


class RankState:
    """The state of one rank's share of a model, and the kept memory for its copies."""

    def __init__(self, turns: Turns, memory: DeviceMemory) -> None:
        """`turns` has what is trained; below low-rank factors weights come from model.path."""
        self._turns = turns
        self._memory = memory
        self._generations: list[Generation] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of kept memory that one copy needs."""
        return count_bytes(self._list_bytes(), self.index)

    @cached_property
    def index(self) -> bytes:
        """Where which part of which state lies in each copy; see process/kept_copies.py."""
        storages = self._find_storages()
        places, _ = place_tensors(list(storages.values()))
        starts = {key: start for key, (start, _) in zip(storages, places, strict=True)}
        return encode_index(list_spans(self._turns, starts))

    def use(self, paths: Sequence[str]) -> None:
        """Keep copies in the memory at these paths, which may hold copies of an earlier process.

        Raises ValueError if a path cannot be opened.
        """
        self._generations = [Generation(path) for path in paths]

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose copies are whole."""
        return sorted(g.step for g in self._generations if g.step is not None)

    def keep(self, step: int) -> tuple[int, int]:
        """Copy the state after `step` in the place of the oldest copy.

        Parts of the model may be moved out to host memory. Returns (number of the copy, its bytes).
        """
        oldest = self._find_oldest()
        small = self._read_small()
        tensors = self._list_bytes()
        return oldest, self._generations[oldest].write(step, small, tensors, self.index)

    def compose(self, step: int, paths: Mapping[str, str], like: str) -> int:
        """Make the copy of `step` of copies that ranks of another layout kept.

        paths   memory with a copy of the step, by rank, those that are nearest first
        like    the rank among them that had this rank's coordinates
        Returns the number of the copy that was made. Raises StateLostError if one is damaged, and
        ValueError if none has a part of the state.
        """
        check_named(self._turns)
        sources = {name: Generation(path) for name, path in paths.items()}
        oldest = self._find_oldest()
        tensors = self._list_bytes()
        self._generations[oldest].compose(step, tensors, self.index, sources, like)
        return oldest

    def _find_oldest(self) -> int:
        """Return the number of the copy whose place the next one takes."""
        ages = [-1 if copy.step is None else copy.step for copy in self._generations]
        return ages.index(min(ages))

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Go back to the state after `step`.

        All parts must be in device memory. A collective over all ranks. Raises StateLostError if
        the copy is not whole.
        """
        kept = next((g for g in self._generations if g.step == step), None)
        if kept is None:
            raise StateLostError(f"the state of step {step} is not in memory: {self.kept_steps}")
        small = kept.read(step, self._list_bytes())
        for later in self._generations:
            if later.step is not None and later.step > step:
                later.clear()  # of a step that is done again
        self._write_small(load_safely(io.BytesIO(small), "a rank's kept state"))
        for learner in self._turns.learners.values():
            for part in parts_of(learner.optimizer):
                part._copy_main_params_to_model_params()
            for chunk in learner.chunks:
                chunk.start_param_sync(force_sync=True)

    def _list_bytes(self) -> list[Tensor]:
        """Return the bytes of all kept tensors, each storage once, in an order that never changes.

        A storage that is moved out gives its copy in host memory.
        """
        return list(self._find_storages().values())

    def _find_storages(self) -> dict[int, Tensor]:
        """Return the same by the storage's key; without storages of no bytes."""
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in self._list_tensors():
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
        found = {key: self._memory.read_bytes(storage) for key, storage in storages.items()}
        return {key: bytes_B for key, bytes_B in found.items() if bytes_B.numel()}

    def _list_tensors(self) -> Iterator[Tensor]:
        for learner in self._turns.learners.values():
            yield from list_optimizer_tensors(learner.optimizer)
        has_factors = bool(self._turns.facts)
        for chunk in self._turns.chosen.chunks:
            yield from unwrap_model(chunk).buffers()
            for parameter in chunk.parameters():
                if not parameter.requires_grad and not has_factors:
                    yield parameter.detach()

    def _list_groups(self) -> list[dict[str, Any]]:
        learners = self._turns.learners.values()
        parts = [part for learner in learners for part in parts_of(learner.optimizer)]
        return [group for part in parts for group in part.optimizer.param_groups]

    def _read_small(self) -> bytes:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._list_groups()
        ]
        file = io.BytesIO()
        rng = rng_state(default_generators())
        torch.save({"steps": self._turns.steps, "groups": groups, "rng": rng}, file)
        return file.getvalue()

    def _write_small(self, small: dict[str, Any]) -> None:
        for group, saved in zip(self._list_groups(), small["groups"], strict=True):
            group.update(saved)
        self._turns.count_from(small["steps"])
        set_rng_state(small["rng"], default_generators())
