"""Compares a checkpoint with its checksums, or two checkpoints with each other, band by band."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from zlib_ng import zlib_ng

from checkpoint_tools.assembly import Assembly, join_pieces, whole
from checkpoint_tools.files import check_whole_files
from checkpoint_tools.foreign_keys import drop_tensors
from checkpoint_tools.hf_model import find_tied_heads, read_config
from checkpoint_tools.int4 import unpack_names
from checkpoint_tools.ledger import Ledger
from checkpoint_tools.megatron_model import choose_config, choose_mtp, has_mtp, hf_assemblies
from checkpoint_tools.opening import open_checkpoint
from checkpoint_tools.options import Effort, work_through
from checkpoint_tools.output import buffer_bytes, check_held
from checkpoint_tools.reader import Reader, ReadRecord, bands
from checkpoint_tools.stored import DTYPE_BYTES, Checkpoint
from checkpoint_tools.torch_dist import is_of_optimizer, model_tensors
from mcore_rl.weights.box import unravel
from mcore_rl.weights.hf.int4 import find_int4_names
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig


@dataclass(frozen=True)
class Pair:
    """The same tensor of two checkpoints, or of a single one, which is then only read."""

    name: str
    first: Assembly
    second: Assembly | None = None

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + (self.second.num_bytes if self.second else 0)


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    index           index of the first element that differs; `first` and `second` are its two values
    count, numel    number of elements that differ, and of all
    max_abs         largest absolute difference
    """

    index: tuple[int, ...]
    first: float
    second: float
    count: int
    numel: int
    max_abs: float


@dataclass
class Compared:
    """Result for a pair: CRC-32 of each tensor's elements in order, and the difference, if any."""

    crc32: int = 0
    second_crc32: int = 0
    difference: Difference | None = None
    record: ReadRecord = field(default_factory=ReadRecord)


class Comparer:
    """Compares pairs of tensors of equal dtype and shape, in one process."""

    def __init__(self, memory_bytes: int) -> None:
        self._band_bytes = buffer_bytes(memory_bytes) // 2
        self._reader = Reader(self._band_bytes)

    def __call__(self, pair: Pair) -> Compared:
        result = Compared()
        size = DTYPE_BYTES[pair.first.dtype]
        for assembly in (pair.first, pair.second):
            for stretch in assembly.skipped if assembly else ():
                self._reader.skip(stretch)
        ours = bands(pair.first, self._band_bytes)
        theirs = bands(pair.second, self._band_bytes) if pair.second else ours
        for band, their_band in zip(ours, theirs, strict=True):
            first = memoryview(bytearray((band.stop - band.start) * size))
            self._reader.fill(pair.first, band, first)
            result.crc32 = zlib_ng.crc32(first, result.crc32)
            if pair.second is None:
                continue
            second = memoryview(bytearray(len(first)))
            self._reader.fill(pair.second, their_band, second)
            result.second_crc32 = zlib_ng.crc32(second, result.second_crc32)
            if first != second:
                difference = _find_difference(pair.first, band.start, first, second)
                result.difference = _merge(result.difference, difference)
        result.record = self._reader.take_record()
        return result


def _find_difference(
    assembly: Assembly, start: int, first: memoryview, second: memoryview
) -> Difference:
    """Describe the difference of two bands that begin at element `start` and are not equal."""
    size = DTYPE_BYTES[assembly.dtype]
    dtype = getattr(torch, assembly.dtype)
    first_bytes = torch.frombuffer(first, dtype=torch.uint8)
    second_bytes = torch.frombuffer(second, dtype=torch.uint8)
    # Bytes are compared, so that NaNs of equal bits are equal.
    differs = (first_bytes != second_bytes).view(-1, size).any(1)
    places = differs.nonzero()[:, 0]
    first_values = torch.frombuffer(first, dtype=dtype)[places].double()
    second_values = torch.frombuffer(second, dtype=dtype)[places].double()
    return Difference(
        index=unravel(start + int(places[0]), assembly.shape),
        first=first_values[0].item(),
        second=second_values[0].item(),
        count=len(places),
        numel=assembly.num_bytes // size,
        max_abs=(first_values - second_values).abs().max().item(),
    )


def _merge(earlier: Difference | None, later: Difference) -> Difference:
    """Combine the differences of two bands of a tensor; the first element is the earlier band's."""
    if earlier is None:
        return later
    return replace(
        earlier,
        count=earlier.count + later.count,
        max_abs=max(earlier.max_abs, later.max_abs),
    )


SHOWN = 10
"""Number of differences that the command prints."""


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    differences   a line per tensor that differs, in the order of names
    crc32         tensor -> CRC-32 of its elements in the first checkpoint
    checked       number of checksums that were compared
    notes         what could not be compared
    """

    num_tensors: int
    num_bytes: int
    differences: tuple[str, ...]
    crc32: Mapping[str, int]
    checked: int
    notes: tuple[str, ...]
    peak_bytes: int

    @property
    def equal(self) -> bool:
        return not self.differences


def verify(
    first: Path,
    second: Path | None,
    source_hf: Path | None,
    optimizer: bool,
    effort: Effort,
    leave_out: Sequence[str] = (),
) -> Verdict:
    """Read every tensor of a checkpoint; compare it with its checksums or with another checkpoint.

    source_hf   directory whose config.json relates Megatron's tensors to HuggingFace's; None: that
                of the HuggingFace checkpoint
    optimizer   also compare the optimizer's state, if both checkpoints are Megatron's
    leave_out   shell patterns of keys of tensors that are not compared
    Raises ValueError with the file or tensor that is damaged.
    """
    opened = [open_checkpoint(path) for path in (first, second) if path is not None]
    checkpoints = _unpack_unlike(drop_tensors(opened, leave_out))
    notes = [
        f"{checkpoint.folder} came without checksums: only its structure was checked, and the"
        " checksums inside archives"
        for checkpoint in checkpoints
        if checkpoint.sums is None
    ]
    sides = _sides(checkpoints, source_hf, with_optimizer=optimizer or second is None)
    pairs, differences = _pairs(sides)
    made = [side for pair in pairs for side in (pair.first, pair.second) if side is not None]
    check_held(made, effort.worker_bytes)
    ledger = Ledger(checkpoints)
    crc32: dict[str, int] = {}

    def take(pair: Pair, result: Compared) -> None:
        ledger.add(result.record)
        crc32[pair.name] = result.crc32
        if result.difference is not None:
            differences[pair.name] = _describe(pair.name, result, result.difference)

    make = partial(Comparer, effort.worker_bytes)
    peak = work_through(make, pairs, lambda pair: pair.num_bytes, effort, "verify", take)
    if second is None:
        check_whole_files(checkpoints[0])
    lines = tuple(differences[name] for name in sorted(differences))
    num_bytes = sum(pair.num_bytes for pair in pairs)
    return Verdict(len(pairs), num_bytes, lines, crc32, ledger.num_checked, tuple(notes), peak)


def _unpack_unlike(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Take INT4 words for the matrices that they encode, unless all checkpoints have such words."""
    packed = [bool(find_int4_names(checkpoint.tensors)) for checkpoint in checkpoints]
    if all(packed) or not any(packed):
        return checkpoints
    return [replace(each, tensors=unpack_names(each.tensors)) for each in checkpoints]


def _describe(name: str, result: Compared, difference: Difference) -> str:
    return (
        f"{name}: {difference.count} of {difference.numel} elements differ, the first at"
        f" {list(difference.index)}: {difference.first!r} and {difference.second!r}; largest"
        f" difference {difference.max_abs:.3g}; checksums {result.crc32:08x} and"
        f" {result.second_crc32:08x}"
    )


def _sides(
    checkpoints: list[Checkpoint], source_hf: Path | None, with_optimizer: bool
) -> list[dict[str, Assembly]]:
    """Return each checkpoint's tensors by name, by HuggingFace's names if their kinds differ."""
    kinds = Counter(checkpoint.kind for checkpoint in checkpoints)
    if len(kinds) == 1:
        sides = [
            {
                key: join_pieces(key, tensor.dtype, tensor.shape, tensor.chunks)
                for key, tensor in checkpoint.tensors.items()
                if with_optimizer or not is_of_optimizer(key)
            }
            for checkpoint in checkpoints
        ]
        if len(sides) == 2 and "hf" in kinds:
            _share_tied_heads(checkpoints, sides)
        return sides
    hf = next(checkpoint for checkpoint in checkpoints if checkpoint.kind == "hf")
    config = read_config(source_hf or hf.folder)
    if any(has_mtp(c.tensors) for c in checkpoints if c.kind == "torch_dist"):
        config = choose_mtp(config)
    return [_translate_names(checkpoint, config) for checkpoint in checkpoints]


def _share_tied_heads(checkpoints: list[Checkpoint], sides: list[dict[str, Assembly]]) -> None:
    """Give a directory with tied embeddings an output layer if the other has one of its own.

    If both are tied, neither needs one: a stored copy is equal to the embeddings.
    """
    tied = [find_tied_heads(checkpoint.folder) for checkpoint in checkpoints]
    for checkpoint, side, own, others, other_side in zip(
        checkpoints, sides, tied, reversed(tied), reversed(sides), strict=True
    ):
        for head, embedding in own.items():
            side.pop(head, None)
            if head in other_side and head not in others and embedding in checkpoint.tensors:
                side[head] = whole(checkpoint.tensors[embedding].chunks[0], name=head)


def _translate_names(checkpoint: Checkpoint, config: HfConfig) -> dict[str, Assembly]:
    if checkpoint.kind == "torch_dist":
        tensors = {tensor.key: tensor for tensor in model_tensors(checkpoint)}
        return hf_assemblies(
            tensors.values(), choose_config(tensors, config), None, checkpoint.folder
        )
    family = family_of(config)
    return {
        name: whole(tensor.chunks[0])
        for name, tensor in checkpoint.tensors.items()
        if name not in family.find_left_out(config) and not family.is_carried(config, name)
    }


def _pairs(sides: list[dict[str, Assembly]]) -> tuple[list[Pair], dict[str, str]]:
    """Return the pairs to compare by element, and the differences seen without reading."""
    if len(sides) == 1:
        return [Pair(name, made) for name, made in sides[0].items()], {}
    first, second = sides
    pairs: list[Pair] = []
    differences: dict[str, str] = {}
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            differences[name] = f"{name}: only in the {'second' if a is None else 'first'}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            differences[name] = f"{name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        else:
            pairs.append(Pair(name, a, b))
    return pairs, differences
