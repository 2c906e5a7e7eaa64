"""Compares a checkpoint's files with its checksums.json and names the file that is damaged."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from checkpoint_tools.stored import Checkpoint
from mcore_rl.weights.hf.checksums import (
    MANIFEST,
    FileSums,
    read_manifest,
    sum_file,
    sum_small_files,
    write_manifest,
)
from mcore_rl.weights.megatron_files.integrity import REMEDY, check_sizes, find_damage


def check_manifest(folder: Path, data_files: Collection[str]) -> dict[str, FileSums] | None:
    """Return the checksums that came with a checkpoint, or None if there are none.

    The sizes of all files are checked, and the contents of all but `data_files`, which are checked
    while their tensors are read. Raises ValueError with the file that is missing, has another size
    or other contents, or has no checksums.
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
    """Compare with checksums.json all bytes but those of tensors: headers and objects.

    Returns the number of checksums compared. Raises ValueError with the file and the object or
    byte.
    """
    if checkpoint.sums is None:
        return 0
    tensors = {(c.file, c.start) for tensor in checkpoint.tensors.values() for c in tensor.chunks}
    names = {(item.file, item.start): item.key for item in checkpoint.items}
    count = 0
    for file in sorted({file for file, _ in tensors | names.keys()}):
        path = checkpoint.folder / file
        spans = [span for span in checkpoint.sums[file].spans if (file, span.start) not in tensors]
        damaged = find_damage(checkpoint.folder, file, spans)
        if damaged is not None:
            key = names.get((file, damaged.start))
            place = f"byte {damaged.start}" if key is None else repr(key)
            raise ValueError(f"{path}: {place} does not agree with {MANIFEST}: the file is damaged")
        count += len(spans)
    return count


def _find_differing(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files that checksums.json lists and that differ, or do not exist any more."""
    folder = checkpoint.folder
    for name, entry in (read_manifest(folder) or {}).items():
        path = folder / name
        is_same = path.is_file() and path.stat().st_size == entry.num_bytes
        if not is_same or find_damage(folder, name, entry.spans) is not None:
            yield name


def write_checksums(checkpoint: Checkpoint, changed: Collection[str] = ()) -> Path:
    """Write checksums.json for the files as they are now, and return its path.

    changed   files that may differ from the list that is there, by name
    Raises ValueError with the files that differ and are not among `changed`: a new list would make
    damage look whole.
    """
    differing = sorted({*_find_differing(checkpoint)} - {*changed})
    if differing:
        raise ValueError(
            f"{checkpoint.folder / MANIFEST}: {', '.join(differing)} no longer agree with it. Copy"
            " damaged files again from where they came; those that you changed yourself, name:"
            f" {' '.join(f'--changed {name}' for name in differing)}"
        )
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
