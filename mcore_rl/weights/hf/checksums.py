"""Takes the checksums of a checkpoint's files and keeps them in checksums.json beside the files.

Each file is cut into spans without gaps, one for the header and one per tensor, and each span has a
CRC-32:

    model-00001.safetensors  | header | q_proj.weight | k_proj.weight |
                               crc      crc             crc

The CRC-32 is that of zip and zlib. It always shows a flipped byte and any burst of up to 32 bits.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zlib_ng import zlib_ng

from mcore_rl.process.disk import force
from mcore_rl.process.file_list import MANIFEST, is_inside, list_files, read_json

ALGORITHM = "crc32"
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class ByteSpan:
    """The bytes [start, start + num_bytes) of a file and their CRC-32."""

    start: int
    num_bytes: int
    crc32: int

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True)
class FileSums:
    """The size of a file and the spans it consists of, in order and without gaps."""

    num_bytes: int
    spans: tuple[ByteSpan, ...]

    def __post_init__(self) -> None:
        at = 0
        for span in self.spans:
            if span.start != at or span.num_bytes <= 0:
                raise ValueError(f"a span begins at byte {span.start}, the one before ends at {at}")
            at = span.stop
        if at != self.num_bytes:
            raise ValueError(f"spans end at byte {at} of {self.num_bytes}")


def sum_file(path: Path, edges: Iterable[int] = ()) -> FileSums:
    """Return the checksums of a file, cut at the byte offsets `edges`. Peak memory: 4 MiB."""
    num_bytes = path.stat().st_size
    cuts = sorted({0, num_bytes, *(edge for edge in edges if 0 < edge < num_bytes)})
    return FileSums(num_bytes, tuple(sum_ranges(path, pairwise(cuts))))


def sum_ranges(path: Path, ranges: Iterable[tuple[int, int]]) -> list[ByteSpan]:
    """Return the checksum of each byte range [start, stop) of a file. Peak memory: 4 MiB.

    Raises ValueError if the file ends within a range.
    """
    buffer = bytearray(_READ_BYTES)
    with path.open("rb") as file:
        return [
            ByteSpan(start, stop - start, _sum_range(file.fileno(), start, stop, buffer, path))
            for start, stop in ranges
        ]


def sum_safetensors(path: Path) -> FileSums:
    """Return the checksums of a safetensors file: one span for the header, then one per tensor."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    first = 8 + header_bytes
    ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return sum_file(path, (first, *(first + end for end in ends)))


def _sum_range(descriptor: int, start: int, stop: int, buffer: bytearray, path: Path) -> int:
    view = memoryview(buffer)
    crc = 0
    while start < stop:
        count = os.preadv(descriptor, [view[: min(len(buffer), stop - start)]], start)
        if count == 0:
            raise ValueError(f"{path} ends at byte {start} of at least {stop}: it was truncated")
        crc = zlib_ng.crc32(view[:count], crc)
        start += count
    return crc


def write_manifest(folder: Path, sums: Mapping[str, FileSums], name: str = MANIFEST) -> None:
    """Write the checksums for `read_manifest`; the file appears complete or not at all."""
    files = {
        file: {
            "bytes": entry.num_bytes,
            "spans": [[span.start, span.num_bytes, f"{span.crc32:08x}"] for span in entry.spans],
        }
        for file, entry in sorted(sums.items())
    }
    temporary = folder / (name + ".part")
    temporary.write_text(json.dumps({"algorithm": ALGORITHM, "files": files}) + "\n")
    force(temporary)
    temporary.rename(folder / name)


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, FileSums] | None:
    """Return file name -> checksums, or None if the checkpoint has no manifest.

    Raises ValueError naming the manifest if it is damaged.
    """
    path = folder / name
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm is {content['algorithm']!r}, only {ALGORITHM!r} is known")
        outside = [file for file in content["files"] if not is_inside(file)]
        if outside:
            raise ValueError(f"it names {outside[0]!r}, which is not a file of the folder")
        return {file: _parse_file_sums(entry) for file, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): copy it from the original again, or remove it to go"
            " without checksums"
        ) from error


def _parse_file_sums(entry: Mapping[str, object]) -> FileSums:
    num_bytes = entry["bytes"]
    spans = entry["spans"]
    if not isinstance(num_bytes, int) or not isinstance(spans, list):
        raise ValueError("bytes or spans of a file are missing")
    return FileSums(
        num_bytes, tuple(ByteSpan(int(at), int(count), _parse_crc(crc)) for at, count, crc in spans)
    )


def _parse_crc(text: str) -> int:
    """Return the number of eight hexadecimal digits; nothing else is a CRC-32 of a list."""
    crc = int(text, 16)
    if text != f"{crc:08x}":
        raise ValueError(f"{text!r} is no CRC-32 in eight hexadecimal digits")
    return crc


def sum_small_files(folder: Path, known: Iterable[str]) -> dict[str, FileSums]:
    """Return the checksums of the files in `folder`, and in its folders, that are not `known`.

    These are the configuration, the tokenizer and other metadata.
    """
    skipped = set(known)
    names = (name for name in list_files(folder) if name not in skipped)
    return {name: sum_file(folder / name) for name in names}
