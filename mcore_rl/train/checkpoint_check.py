"""Checks a checkpoint folder for damage and for pickles that could run code.

If one rank finds either, all ranks raise the same error. torch and megatron-core unpickle
`.metadata` and the objects in .distcp files (generators, extra states) without restriction. Here
both are read by restricted unpicklers first, and the load runs with the restriction on.
"""

import io
import logging
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.process.variables import set_variables
from mcore_rl.weights.hf.checksums import MANIFEST, ByteSpan, read_manifest
from mcore_rl.weights.megatron_files.integrity import (
    REMEDY,
    add_remedy,
    check_sizes,
    find_damage,
    list_spans_of_rank,
)
from mcore_rl.weights.megatron_files.metadata import (
    COMMON,
    COMMON_OBJECT,
    METADATA,
    READ_ERRORS,
    Place,
    check_archive,
    check_bounded,
    find_common,
    read_metadata_of,
    read_places,
)
from mcore_rl.weights.models.table import Shape

EXTRA_STATE = "_extra_state"
_OF_RUN: Mapping[str, type] = {"step": int, "extra": dict, "layout": dict}
_FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_log = logging.getLogger(__name__)


def check_checkpoint(folder: Path, *, verify: bool) -> None:
    """Check a checkpoint before it is loaded; collective over all ranks.

    verify   compare all files with checksums.json, each byte on one rank
    Raises ValueError on every rank, with the first rank's message, which names the file.
    """
    if verify:
        _run_on_all_ranks(_check_sums, folder)
    _run_on_all_ranks(_check_bounded, folder)
    _run_on_all_ranks(_check_pickles, folder)


@contextmanager
def only_safe_pickles() -> Iterator[None]:
    """Within the block every torch.load of this process is one of `weights_only=True`.

    torch.distributed.checkpoint passes False for objects, and only the environment overrides that.
    Beside the classes that torch and megatron-core allow, `bytes` is allowed: an empty BytesIO is
    pickled with it.
    """
    with (
        set_variables({_FORCE_SAFE: "1", _FORCE_UNSAFE: None}),
        torch.serialization.safe_globals([bytes]),
    ):
        yield


def _run_on_all_ranks(check: Callable[[Path], None], folder: Path) -> None:
    """Run `check` on every rank. If it fails on any, raise the first failure on all of them."""
    message = None
    try:
        check(folder)
    except (ValueError, OSError) as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for text in messages:
        if text is not None:
            raise ValueError(add_remedy(text))


def _check_bounded(folder: Path) -> None:
    """Refuse files that would take too much time or memory; one rank tries all pickles."""
    if dist.get_rank() == 0:
        check_bounded(folder)


def _check_sums(folder: Path) -> None:
    """Compare this rank's share of the bytes with checksums.json."""
    sums = read_manifest(folder)
    rank = dist.get_rank()
    if sums is None:
        if rank == 0:
            _log.warning("%s has no %s: loaded without verification", folder, MANIFEST)
        return
    if rank == 0:
        check_sizes(folder, sums)
    for name, spans in list_spans_of_rank(sums, rank, dist.get_world_size()).items():
        span = find_damage(folder, name, spans)
        if span is not None:
            raise ValueError(
                f"{folder / name}: {_describe(folder, name, span)} does not agree with {MANIFEST}:"
                " the file is damaged. run.resume=newest_whole resumes from the checkpoint before"
            )


def _describe(folder: Path, name: str, span: ByteSpan) -> str:
    """Name the tensor or object at a span of a file, or else its bytes."""
    try:
        for place in read_places_of(folder).values():
            if (place.file, place.start) == (name, span.start):
                return repr(place.key)
    except ValueError:
        pass  # .metadata may be the damaged file
    return f"the content of bytes {span.start} to {span.stop}"


def _check_pickles(folder: Path) -> None:
    """Read every pickle that loading will read, and refuse what is not on the allow-lists.

    All ranks read `.metadata`, rank 0 reads common.pt, if there is one, and the objects are divided
    among ranks.
    """
    places = read_places_of(folder)
    rank = dist.get_rank()
    if rank == 0:
        files = {METADATA, *(place.file for place in places.values())}
        if find_common(folder, places) is None:
            path = folder / COMMON
            files.add(COMMON)
            _check_common(load_safely(path, str(path)), str(path))
        _check_listed(folder, files)
    objects = {
        (place.file, place.start, place.num_bytes, key == COMMON_OBJECT): place
        for (key, offset), place in sorted(places.items(), key=lambda entry: entry[0][0])
        if offset is None
    }
    for place in list(objects.values())[rank :: dist.get_world_size()]:
        _check_object(folder, place)


def _check_listed(folder: Path, files: Collection[str]) -> None:
    """Raise ValueError for a file that would be loaded although checksums.json lacks it."""
    sums = read_manifest(folder)
    unlisted = [] if sums is None else sorted(set(files) - sums.keys())
    if unlisted:
        raise ValueError(f"{folder / unlisted[0]} is not in {MANIFEST}: {REMEDY}")


def read_places_of(folder: Path) -> Mapping[tuple[str, Shape | None], Place]:
    """Return where everything is stored, as `read_places`. Raises ValueError with the file."""
    metadata = read_metadata_of(folder)
    try:
        return read_places(metadata)
    except READ_ERRORS as error:
        path = folder / METADATA
        raise ValueError(f"{path} is damaged: {error or type(error).__name__}") from error


def _check_object(folder: Path, place: Place) -> None:
    path = folder / place.file
    with path.open("rb") as file:
        file.seek(place.start)
        content = io.BytesIO(file.read(place.num_bytes))
    where = f"{path}: object {place.key!r}"
    value = load_safely(content, where)
    if place.key == COMMON_OBJECT:
        is_wrapped = isinstance(value, list) and len(value) == 1
        _check_common(value[0] if is_wrapped else None, where)
    if EXTRA_STATE in place.key and _has_bytes(value):
        raise ValueError(
            f"{path}: object {place.key!r} holds a state of Transformer Engine's FP8 modules, which"
            " would be unpickled without restriction and no model trained here has: not loaded"
        )


def _check_common(state: object, where: str) -> None:
    """Raise ValueError with `where` unless `state` is what a run keeps beside its tensors."""
    found = state if isinstance(state, dict) else {}
    wrong = [name for name, kind in _OF_RUN.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise ValueError(
            f"{where} holds no run's {' and '.join(wrong)}: it is damaged, or another system wrote"
            " it (mcore-rl-ckpt to-hf reads its weights)"
        )


def load_safely(file: Path | io.BytesIO, where: str) -> Any:
    """Load a file of torch.save by the restricted unpickler. Raises ValueError with `where`.

    The archive's own checksums are compared first, which torch does not do.
    """
    try:
        is_path = isinstance(file, Path)
        check_archive(file, file.stat().st_size if is_path else len(file.getbuffer()))
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} in it does not agree with its checksum")
        if not is_path:
            file.seek(0)
        with only_safe_pickles():
            return torch.load(file, map_location="cpu", weights_only=True)
    except READ_ERRORS as error:
        text = str(error) or type(error).__name__
        refused = re.search(r"GLOBAL (\S+) (was not an allowed|whose module)", text)
        if refused is not None:
            raise ValueError(
                f"{where} names {refused[1]}, which no checkpoint needs: not loaded"
            ) from error
        raise ValueError(f"{where} is damaged: {text.splitlines()[0]}") from error


def _has_bytes(value: Any) -> bool:
    """Return True if an extra state, or a list of them, is anything but empty."""
    if isinstance(value, list | tuple):
        return any(_has_bytes(member) for member in value)
    if isinstance(value, Tensor):
        return value.numel() > 0
    if isinstance(value, io.BytesIO):
        return bool(value.getvalue())
    return value is not None
