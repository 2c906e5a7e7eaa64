"""Names the file and the tensor of a checkpoint that cannot be read, or has NaN in it.

Files are searched only after a load has failed or has given numbers that are not finite.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.device import device
from mcore_rl.train.checkpoint_check import load_safely, read_places_of
from mcore_rl.weights.finite import count_not_finite
from mcore_rl.weights.megatron_files.integrity import COPY_AGAIN
from mcore_rl.weights.megatron_files.metadata import READ_ERRORS, Place

_MOVE_ASIDE = "move the checkpoint's folder aside, and the run continues from the one before"


@contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Raise ValueError with file and tensor if the body fails to read a checkpoint that is damaged.

    Any other error passes through.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch has no type for bytes it cannot read
        fault = _find_damage(folder, _places(folder))
        if not fault:
            raise
        raise ValueError(f"{fault}: {COPY_AGAIN}") from error


def refuse_not_finite(loaded: Iterable[Tensor], folder: Path, step: int) -> None:
    """Raise ValueError on every rank if tensors that were loaded hold NaN; collective.

    The message has the step, the file and the tensor. Numbers that no file has, such as those of
    padding, pass.
    """
    has_bad = any(count_not_finite(tensor) for tensor in loaded)
    num_bad = torch.tensor([int(has_bad)], device=device())
    dist.all_reduce(num_bad)
    if num_bad.item() == 0:
        return
    own = _find_not_finite(folder, _places(folder)[dist.get_rank() :: dist.get_world_size()])
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, own)
    fault = next(filter(None, found), "")
    if fault:
        raise ValueError(f"step {step}: {fault}: {_MOVE_ASIDE}")


def _places(folder: Path) -> list[Place]:
    """Return the places of all tensors and objects, in the order of the files."""
    places = set(read_places_of(folder).values())
    return sorted(places, key=lambda place: (place.file, place.start, place.key))


def _read(folder: Path, place: Place) -> bytes:
    with (folder / place.file).open("rb") as file:
        file.seek(place.start)
        return file.read(place.num_bytes)


def _find_damage(folder: Path, places: Iterable[Place]) -> str:
    """Return the first file and tensor whose archive cannot be read, or ""."""
    for place in places:
        where = f"{folder / place.file}: {place.key!r}"
        try:
            content = _read(folder, place)
            if len(content) < place.num_bytes:
                end = place.start + place.num_bytes
                return f"{where} should end at byte {end}, after the end of the file: it was cut"
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                damaged = archive.testzip()
        except (*READ_ERRORS, OSError) as error:
            return f"{where} is damaged ({error})"
        if damaged is not None:
            return f"{where} is damaged: {damaged!r} in it does not agree with its checksum"
    return ""


def _find_not_finite(folder: Path, places: Iterable[Place]) -> str:
    """Return the first file and tensor with numbers that are not finite, or ""."""
    for place in places:
        where = f"{folder / place.file}: tensor {place.key!r}"
        value = load_safely(io.BytesIO(_read(folder, place)), where)
        if isinstance(value, Tensor) and (num_bad := count_not_finite(value)):
            return f"{where} has {num_bad} of {value.numel()} values that are not finite"
    return ""
