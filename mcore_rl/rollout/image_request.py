"""Packs a request with the patches of its images, and opens it again in the engine's server.

SGLang's /generate takes images as files, which it would decode and resize itself, to other pixels
than the trainer's. Its processors also take patches, but not by JSON. Here they travel as they are:

    safetensors: request (JSON, uint8), pixels [P, D] float32, grids [I, 3] int64,
                 intervals [I] float32

An engine on the machine that made the patches maps their files instead of taking a copy:

    JSON: request with "patches": [{digest, path, shape, grid, interval}, ...]

Pieces of videos travel as images do: image_outputs.py gives them to SGLang.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mcore_rl.data.images.shared_patches import (
    PATCH_FILES,
    PlacedPatches,
    map_patches,
)
from mcore_rl.types import Images

PATH = "/generate_images"
"""The server's route for such requests."""
NOT_HERE = 410
"""The HTTP status that asks for the patches themselves: their files are not on this machine."""
FORMATS = {
    "request": torch.uint8,
    "pixels": torch.float32,
    "grids": torch.int64,
    "intervals": torch.float32,
}


def pack_request(body: Mapping[str, Any], images: Images) -> bytes:
    """Return the body of a request to `PATH`.

    body     what SGLang's /generate takes, with `input_ids` in which placeholders are expanded
    images   of one sequence
    """
    request = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
    return save(
        {
            "request": request,
            "pixels": images.pixels_PD.contiguous(),
            "grids": images.grids_I3.contiguous(),
            "intervals": images.intervals().contiguous(),
        }
    )


def unpack_request(data: bytes) -> tuple[dict[str, Any], Images]:
    """Return (body, images) of a packed request.

    Raises ValueError for anything else.
    """
    try:
        tensors = load(data)
        body = json.loads(bytes(tensors["request"].tolist()))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"not a request with images: {error}") from error
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if dtypes != FORMATS or not isinstance(body, dict):
        raise ValueError(f"not a request with images: tensors {dtypes}, expected {FORMATS}")
    return body, _images(tensors["pixels"], tensors["grids"], tensors["intervals"])


def refer_request(body: Mapping[str, Any], placed: Sequence[PlacedPatches]) -> bytes:
    """Return the body of a request to `PATH` whose patches the engine maps."""
    return json.dumps({**body, "patches": [asdict(each) for each in placed]}).encode()


def resolve_request(data: bytes) -> tuple[dict[str, Any], Images]:
    """Return what `unpack_request` does, of a request that refers to files.

    Raises ValueError for anything else, and FileNotFoundError if a file is not on this machine.
    """
    try:
        body = json.loads(data)
        entries = body.pop("patches")
        placed = [
            PlacedPatches(
                str(entry["digest"]),
                str(entry["path"]),
                (int(entry["shape"][0]), int(entry["shape"][1])),
                tuple(map(int, entry["grid"])),  # type: ignore[arg-type]
                float(entry["interval"]),
            )
            for entry in entries
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"not a request with patches: {error!r}") from error
    parts = []
    for each in placed:
        if Path(each.path).suffix != PATCH_FILES:
            raise ValueError(f"{each.path} is no file of patches, *{PATCH_FILES}")
        pixels_PD = map_patches(each)
        if pixels_PD is None:
            raise FileNotFoundError(each.path)
        parts.append(pixels_PD)
    grids_I3 = torch.tensor([each.grid for each in placed])
    pixels_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return body, _images(pixels_PD, grids_I3, torch.tensor([each.interval for each in placed]))


def check_placeholders(
    body: Mapping[str, Any],
    grids_I3: Tensor,
    placeholder_id: int,
    merge: int,
    start_id: int | None = None,
) -> None:
    """Raise ValueError unless the ids have as many placeholders as the images take, and end behind
    the last image.

    SGLang's scheduler would end with an error. A policy may have sampled a placeholder, which is
    text to it.

    merge      patches along height and along width that become one token
    start_id   the token that begins an image; None: the model has none
    """
    if start_id is not None and list(body["input_ids"])[-1:] == [start_id]:
        raise ValueError(
            f"the ids end with token {start_id}, which begins an image: end them before it"
        )
    num_found = list(body["input_ids"]).count(placeholder_id)
    num_tokens = int(grids_I3.prod(-1).sum()) // merge**2
    if num_found != num_tokens:
        raise ValueError(
            f"{num_found} placeholders (token {placeholder_id}) in the ids, but the images take"
            f" {num_tokens}: expand them, and end the ids before a placeholder that was sampled"
        )


def _images(pixels_PD: Tensor, grids_I3: Tensor, intervals_I: Tensor) -> Images:
    """Return the images of a sequence. Raises ValueError unless the shapes fit together."""
    shapes = (tuple(pixels_PD.shape), tuple(grids_I3.shape), tuple(intervals_I.shape))
    is_grid = grids_I3.dim() == 2 and grids_I3.shape[1] == 3 and len(grids_I3) > 0
    if pixels_PD.dim() != 2 or not is_grid or grids_I3.min() < 1 or shapes[2] != shapes[1][:1]:
        raise ValueError(
            f"not a request with images: shapes {shapes}, expected [P, D], [I, 3] and [I]"
        )
    num_patches = int(grids_I3.prod(-1).sum())
    if num_patches != len(pixels_PD):
        raise ValueError(f"{len(pixels_PD)} patches, but the grids describe {num_patches}")
    return Images(pixels_PD, grids_I3, (len(grids_I3),), intervals_I)
