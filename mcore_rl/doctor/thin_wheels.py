"""Rewrites wheels so that their libraries hold code for one kind of GPU, for machines without a
network to which every byte has to be carried.

    python -m mcore_rl.doctor.thin_wheels --arch 90 --out thin wheels/*.whl

A library of CUDA has its kernels once per architecture, in a section of fat binaries. Those that
the GPU does not run are overwritten with zeros, which compress to nothing: 171 MiB of Transformer
Engine's kernels become 17. Nothing else in a library changes, not even its size.

Format of a fat binary, little endian: a header of 16 bytes (magic, version, bytes of the header,
bytes that follow), then entries, each with a header (kind, version, bytes of the header, bytes of
the code, ..., architecture at byte 28) and its code. Seen with cuobjdump of CUDA 13.0.
"""

import argparse
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2
_ENTRY_BYTES = 64
"""The least that an entry's header takes."""


@dataclass(frozen=True)
class Code:
    """Code of one kernel library for one architecture, at bytes [start, stop) of its file."""

    kind: int
    arch: int
    start: int
    stop: int


def thin_library(library: bytearray, arch: int) -> int:
    """Overwrite code that a GPU of compute capability `arch` (90: Hopper) does not run.

    Return how many bytes that are. A fat binary without code for the architecture keeps the newest
    that the driver can run or translate.
    """
    num_blanked = 0
    for start, stop in _sections(library):
        for codes in _fat_binaries(library, start, stop):
            kept = _kept(codes, arch)
            for code in codes:
                if code not in kept:
                    library[code.start : code.stop] = bytes(code.stop - code.start)
                    num_blanked += code.stop - code.start
    return num_blanked


def thin_wheel(wheel: Path, out: Path, arch: int) -> tuple[int, int]:
    """Write a copy of `wheel` into the folder `out`; return the sizes of both in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    thinned = out / wheel.name
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(thinned, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target,
    ):
        for info in source.infolist():
            content = bytearray(source.read(info))
            if ".so" in Path(info.filename).suffixes:
                thin_library(content, arch)
            target.writestr(info, content, zipfile.ZIP_DEFLATED)
    return wheel.stat().st_size, thinned.stat().st_size


def _kept(codes: Sequence[Code], arch: int) -> Sequence[Code]:
    """Return what the GPU runs: code of its architecture, else of an older one of its generation,
    else what the driver translates."""
    cubins = [c for c in codes if c.kind == _CUBIN and c.arch // 10 == arch // 10]
    for candidates in (cubins, [c for c in codes if c.kind == _PTX]):
        usable = [code for code in candidates if code.arch <= arch]
        if usable:
            newest = max(code.arch for code in usable)
            return [code for code in usable if code.arch == newest]
    return ()


def _sections(library: bytearray) -> Iterator[tuple[int, int]]:
    """Yield where the sections of fat binaries begin and end in a 64-bit ELF file."""
    if library[:5] != b"\x7fELF\x02":
        return
    table = struct.unpack_from("<Q", library, 0x28)[0]
    size, number, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(number)]
    if not headers:
        return
    names = headers[names_index][4]
    for name, _, _, _, offset, num_bytes in headers:
        end = library.index(0, names + name)
        if library[names + name : end] == SECTION:
            yield offset, offset + num_bytes


def _fat_binaries(library: bytearray, start: int, stop: int) -> Iterator[list[Code]]:
    """Yield the entries of each fat binary; they lie at multiples of 8 bytes."""
    at = start
    while at + 16 <= stop:
        magic, _, header, num_bytes = struct.unpack_from("<IHHQ", library, at)
        if magic != _MAGIC:
            at += 8
            continue
        yield list(_entries(library, at + header, at + header + num_bytes))
        at += header + num_bytes


def _entries(library: bytearray, at: int, stop: int) -> Iterator[Code]:
    while at + _ENTRY_BYTES <= stop:
        kind, _, header, num_bytes = struct.unpack_from("<HHIQ", library, at)
        arch = struct.unpack_from("<I", library, at + 28)[0]
        yield Code(kind, arch, at + header, at + header + num_bytes)
        at += header + num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keep the code of one kind of GPU in wheels.")
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, required=True, help="compute capability: 90 is Hopper")
    parser.add_argument("--out", type=Path, required=True, help="folder for the copies")
    args = parser.parse_args(argv)
    for wheel in args.wheels:
        if not zipfile.is_zipfile(wheel):
            print(f"{wheel} is not a wheel", file=sys.stderr)
            return 2
    for wheel in args.wheels:
        before, after = thin_wheel(wheel, args.out, args.arch)
        print(f"{wheel.name}: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
