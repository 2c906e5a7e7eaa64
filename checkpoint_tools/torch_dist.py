"""Opens a Megatron checkpoint (torch_dist); returns its tensors and their places in the files.

Reads only .metadata and the small files, without torch.distributed, Megatron or a process group.
"""

import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint_tools.files import check_manifest
from checkpoint_tools.stored import DTYPE_BYTES, Checkpoint, Chunk, Item, StoredTensor
from checkpoint_tools.tiling import check_boxes
from mcore_rl.weights.hf.checksums import FileSums, read_json
from mcore_rl.weights.megatron_files.metadata import (
    COMMON,
    METADATA,
    READ_ERRORS,
    Place,
    Record,
    check_archive,
    check_bounded,
    find_common,
    read_metadata_of,
    read_places,
    read_shape,
)
from mcore_rl.weights.models.table import Shape

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
REWRITE = (
    "Load it there once more and write it as torch_dist: Megatron-LM's options"
    " --ckpt-convert-format torch_dist --ckpt-convert-save <folder> do both"
)
OPTIMIZER = "optimizer."
"""Prefix of the keys of the optimizer's state."""
SHARED = "_extra_state/shard_"
"""Part of the keys of empty objects, many of which may share one place in a file."""


def is_torch_dist(folder: Path) -> bool:
    return (folder / METADATA).exists() or (folder / "metadata.json").exists()


def open_torch_dist(folder: Path, use_sums: bool = True) -> Checkpoint:
    """Read and check the structure of a checkpoint.

    `use_sums` reads checksums.json, if there is one. Raises ValueError with the wrong file or
    tensor.
    """
    _check_backend(folder)
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the checkpoint was not written to its end")
    check_bounded(folder)
    metadata = read_metadata_of(folder)
    try:
        places = read_places(metadata)
        common = find_common(folder, places)
        tensors, items = _read_tensors(folder, metadata.get("state_dict_metadata"), places)
    except READ_ERRORS as error:
        raise ValueError(f"{path} is damaged: {error or type(error).__name__}") from error
    for tensor in tensors.values():
        check_boxes(tensor.key, tensor.shape, [(c.offset, c.shape) for c in tensor.chunks], path)
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
    stored = [Place(chunk.key, chunk.file, chunk.start, chunk.num_bytes) for chunk in chunks]
    stored += [Place(item.key, item.file, item.start, item.num_bytes) for item in items]
    files = _check_files(folder, stored)
    _check_common(folder, common)
    sums = check_manifest(folder, files) if use_sums else None
    if sums is not None:
        _check_spans(folder, chunks, sums)
    return Checkpoint("torch_dist", folder, tensors, tuple(items), sums)


def refuse_other_megatron(folder: Path) -> None:
    """Raise ValueError for Megatron-LM's legacy format, and for a folder of several checkpoints."""
    if next(folder.glob("mp_rank_*"), None) is not None:
        raise ValueError(
            f"{folder} is in Megatron-LM's legacy format torch (mp_rank_*/), which only the layout"
            f" that saved it can read. {REWRITE}"
        )
    steps = sorted(path.name for path in folder.glob("iter_*") if path.is_dir())
    if steps:
        raise ValueError(
            f"{folder} holds {len(steps)} checkpoints: name the folder of one, such as"
            f" {folder / steps[-1]}"
        )


def _check_backend(folder: Path) -> None:
    """Raise ValueError unless metadata.json names the format that is read here."""
    refuse_other_megatron(folder)
    path = folder / "metadata.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: {folder} is not a complete Megatron distributed checkpoint"
            " (choose a step's folder, such as <run.dir>/checkpoints/step_000050)"
        )
    try:
        backend = read_json(path)
        found = {key: backend.get(key) for key in BACKEND}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if found != BACKEND:
        raise ValueError(f"{path}: {found} cannot be read, only {BACKEND}. {REWRITE}")


def _read_tensors(
    folder: Path, entries: Mapping[str, Record], places: dict[tuple[str, Shape | None], Place]
) -> tuple[dict[str, StoredTensor], list[Item]]:
    """Return the tensors by key, and the other objects.

    Takes each place out of `places`. Raises ValueError if one is missing or left over.
    """
    tensors: dict[str, StoredTensor] = {}
    items: list[Item] = []
    files = {place.file for place in places.values()}
    path_of = {file: str(folder / file) for file in files}
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise ValueError(f"a key is a {type(key).__name__}, not a name")
        if "size" not in entry.__dict__:
            place = _take_place(places, key, None)
            items.append(Item(key, place.file, place.start, place.num_bytes))
            continue
        dtype = entry.get("properties").args[0]
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {key!r} has dtype {dtype!r}, which the tools do not carry")
        chunks = tuple(_chunk(path_of, key, dtype, chunk, places) for chunk in entry.get("chunks"))
        tensors[key] = StoredTensor(key, dtype, read_shape(entry.get("size")), chunks)
    if places:
        key, offset = next(iter(places))
        raise ValueError(f"tensor {key!r} at {offset} is stored, but has no entry of its own")
    return tensors, items


def _chunk(
    path_of: Mapping[str, str],
    key: str,
    dtype: str,
    chunk: Record,
    places: dict[tuple[str, Shape | None], Place],
) -> Chunk:
    offset = read_shape(chunk.get("offsets"))
    shape = read_shape(chunk.get("sizes"))
    place = _take_place(places, key, offset)
    start, num_bytes = place.start, place.num_bytes
    path = path_of[place.file]
    return Chunk(key, dtype, offset, shape, path, start, num_bytes, is_archive=True)


def _take_place(
    places: dict[tuple[str, Shape | None], Place], key: str, offset: Shape | None
) -> Place:
    place = places.pop((key, offset), None)
    if place is None:
        raise ValueError(f"tensor {key!r} at {offset} is not stored in any file")
    return place


def _check_files(folder: Path, stored: Sequence[Place]) -> set[str]:
    """Check that every file exists and each of its bytes belongs to one place; return the names."""
    by_file: dict[str, dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
    for place in stored:
        by_file[place.file][place.start, place.num_bytes].append(place.key)
    for file, places in sorted(by_file.items()):
        for (start, _), keys in places.items():
            if len(keys) > 1 and not all(SHARED in key for key in keys):
                raise ValueError(
                    f"{folder / file}: {keys[0]!r} and {keys[1]!r} are both at byte {start}"
                )
    for file, places in sorted(by_file.items()):
        _check_file(folder / file, places)
    return set(by_file)


def _check_file(path: Path, places: Mapping[tuple[int, int], list[str]]) -> None:
    """Raise ValueError unless `places`, (start, bytes) -> keys, make up a file without gaps."""
    if not path.is_file():
        first = next(iter(places.values()))[0]
        raise ValueError(
            f"{path} does not exist: it should hold {len(places)} items, the first is {first!r}"
        )
    size = path.stat().st_size
    at = 0
    for (start, num_bytes), keys in sorted(places.items()):
        if start + num_bytes > size:
            raise ValueError(
                f"{path} has {size} bytes, {keys[0]!r} should end at byte {start + num_bytes}:"
                " it was truncated"
            )
        if start < at:
            raise ValueError(f"{path}: {keys[0]!r} at byte {start} overlaps another item")
        if start > at:
            raise ValueError(
                f"{path}: bytes {at} to {start}, before {keys[0]!r}, belong to nothing"
            )
        at = start + num_bytes
    if at != size:
        raise ValueError(f"{path} has {size} bytes, but its items end at byte {at}")


def _check_spans(folder: Path, chunks: Sequence[Chunk], sums: Mapping[str, FileSums]) -> None:
    """Raise ValueError unless each chunk has a checksum of its own."""
    edges = {
        file: {span.start: span.num_bytes for span in entry.spans} for file, entry in sums.items()
    }
    for chunk in chunks:
        if edges[chunk.file].get(chunk.start) != chunk.num_bytes:
            raise ValueError(
                f"{folder / chunk.file}: checksums.json has none for tensor {chunk.key!r} at byte"
                f" {chunk.start}: {METADATA} or checksums.json is damaged"
            )


def _check_common(folder: Path, place: Place | None) -> None:
    """Raise ValueError unless what is not sharded is an archive that agrees with its checksums."""
    where = folder / COMMON if place is None else f"{folder / place.file}: {place.key!r}"
    content = _open_common(folder, place)
    try:
        check_archive(content, len(content.getbuffer()))
        with zipfile.ZipFile(content) as archive:
            damaged = archive.testzip()
    except READ_ERRORS as error:
        raise ValueError(f"{where} is damaged: {error or type(error).__name__}") from error
    if damaged is not None:
        raise ValueError(f"{where} is damaged: {damaged!r} in it does not agree with its checksum")


def _open_common(folder: Path, place: Place | None) -> io.BytesIO:
    """Return the bytes of common.pt, or of the object at `place`."""
    if place is None:
        return io.BytesIO((folder / COMMON).read_bytes())
    with (folder / place.file).open("rb") as file:
        file.seek(place.start)
        return io.BytesIO(file.read(place.num_bytes))


def read_common(folder: Path) -> dict[str, Any]:
    """Return what is not sharded of the state, or {} if it needs classes that are not loaded here.

    Raises ValueError with the file if it is damaged.
    """
    return parse_common(*copy_common(folder))


def copy_common(folder: Path) -> tuple[io.BytesIO, Path]:
    """Return the archive of what is not sharded of the state, and the file that it lies in."""
    place = find_common(folder, read_places(read_metadata_of(folder)))
    return _open_common(folder, place), folder / (COMMON if place is None else place.file)


def parse_common(archive: io.BytesIO, path: Path) -> dict[str, Any]:
    """Return the content of what `copy_common` returned; as `read_common`."""
    import torch  # imported here, because that takes longer than all other functions do

    try:
        common = torch.load(archive, weights_only=True)
    except (*READ_ERRORS, OSError) as error:
        if "GLOBAL" in str(error):
            return {}
        raise ValueError(
            f"{path} is damaged: {(str(error) or repr(error)).splitlines()[0]}"
        ) from error
    if isinstance(common, list) and common:  # megatron-core stores an object as a list of one
        common = common[0]
    return common if isinstance(common, dict) else {}


def model_tensors(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    """Yield the model's tensors, without the optimizer's and Transformer Engine's states."""
    return (
        tensor
        for key, tensor in checkpoint.tensors.items()
        if not is_of_optimizer(key) and "._extra_state" not in key
    )


def is_of_optimizer(key: str) -> bool:
    """Return True for state of an optimizer, also of one in a chain, which Megatron-LM numbers."""
    return re.match(rf"(chained_\d+\.)?{re.escape(OPTIMIZER)}", key) is not None
