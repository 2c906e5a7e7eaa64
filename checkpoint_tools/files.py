"""The manifest of a checkpoint against its files: sizes of all, contents of the small ones."""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from checkpoint_tools.stored import Checkpoint
from mcore_rl.slices.hf.checksums import (
    MANIFEST,
    FileSums,
    read_manifest,
    sum_file,
    sum_ranges,
    sum_small_files,
    write_manifest,
)
from mcore_rl.slices.megatron_files.integrity import REMEDY, check_sizes, find_damage


def check_manifest(folder: Path, data_files: Collection[str]) -> dict[str, FileSums] | None:
    """The checksums that came with the checkpoint, or None, after checking every file but `data_files`.

    Those are checked while their tensors are read. ValueError names a file that is missing, has another
    size, other contents, or none of its checksums.
    """
    sums = read_manifest(folder)
    if sums is None:
        return None
    check_sizes(folder, sums)
    for name, entry in sorted(sums.items()):
        if name not in data_files and find_damage(folder, name, entry.spans) is not None:
            path = folder / name
            raise ValueError(f"{path}: its contents do not agree with {MANIFEST}: {REMEDY}")
    for name in sorted(data_files):
        if name not in sums:
            raise ValueError(f"{folder / name} is not in {MANIFEST}: {REMEDY}")
    return sums


def check_whole_files(checkpoint: Checkpoint) -> int:
    """Compare with checksums.json what no tensor's reading has covered: headers and other items; how many.

    ValueError names the file and what lies there.
    """
    if checkpoint.sums is None:
        return 0
    tensors = {(c.file, c.start) for tensor in checkpoint.tensors.values() for c in tensor.chunks}
    names = {(item.file, item.start): item.key for item in checkpoint.items}
    count = 0
    for file in sorted({file for file, _ in tensors | names.keys()}):
        path = checkpoint.folder / file
        left = [span for span in checkpoint.sums[file].spans if (file, span.start) not in tensors]
        for span, found in zip(
            left, sum_ranges(path, [(s.start, s.stop) for s in left]), strict=True
        ):
            if span != found:
                what = (
                    repr(names[file, span.start])
                    if (file, span.start) in names
                    else f"byte {span.start}"
                )
                raise ValueError(
                    f"{path}: {what} does not agree with {MANIFEST}: the file is damaged"
                )
            count += 1
    return count


def write_checksums(checkpoint: Checkpoint) -> Path:
    """Write checksums.json anew, of the files as they are now."""
    edges: dict[str, list[int]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            edges[chunk.file] += [chunk.start, chunk.start + chunk.num_bytes]
    for item in checkpoint.items:
        edges[item.file] += [item.start, item.start + item.num_bytes]
    sums = {file: sum_file(checkpoint.folder / file, cuts) for file, cuts in edges.items()}
    sums |= sum_small_files(checkpoint.folder, sums)
    write_manifest(checkpoint.folder, sums)
    return checkpoint.folder / MANIFEST
