"""Requests with images survive their packing; anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mcore_rl.data.images.shared_patches import PlacedPatches, SharedPatches
from mcore_rl.rollout.image_request import (
    check_placeholders,
    pack_request,
    refer_request,
    resolve_request,
    unpack_request,
)
from mcore_rl.types import Images
from tests.support.image_prompts import make_image, make_patches

BODY = {"input_ids": [5, 90, 6], "sampling_params": {"temperature": 1.0}}
IMAGES = Images(
    torch.arange(12.0).reshape(4, 3), torch.tensor([[1, 2, 2]]), (1,), torch.tensor([0.5])
)


def test_a_request_survives() -> None:
    body, images = unpack_request(pack_request(BODY, IMAGES))
    assert body == BODY
    assert images.nums_N == (1,)
    assert torch.equal(images.pixels_PD, IMAGES.pixels_PD)
    assert torch.equal(images.grids_I3, IMAGES.grids_I3)
    assert images.intervals().tolist() == [0.5]


SHAPES = r"expected \[P, D\], \[I, 3\] and \[I\]"


def packed(**changes: Any) -> bytes:
    request = torch.tensor(list(json.dumps(BODY).encode()), dtype=torch.uint8)
    tensors = {
        "request": request,
        "pixels": IMAGES.pixels_PD,
        "grids": IMAGES.grids_I3,
        "intervals": IMAGES.intervals(),
    }
    return save({**tensors, **changes})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a request with images"),
        (b"{}" * 20, "not a request with images"),
        (save({"pixels": torch.zeros(1)}), "not a request with images: 'request'"),
        (packed(request=torch.tensor([91, 93], dtype=torch.uint8)), "expected"),
        (packed(request=torch.tensor([0], dtype=torch.uint8)), "not a request with images"),
        (packed(pixels=torch.zeros(4, 3, dtype=torch.float64)), "tensors"),
        (packed(pixels=torch.zeros(4)), SHAPES),
        (packed(grids=torch.tensor([[1, -2, -2]])), SHAPES),
        (
            packed(grids=torch.zeros(0, 3, dtype=torch.int64)),
            SHAPES,
        ),
        (packed(intervals=torch.ones(2)), SHAPES),
        (packed(pixels=torch.zeros(5, 3)), "5 patches, but the grids describe 4"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_request(data)


def test_files_of_patches_are_mapped(tmp_path: Path) -> None:
    shared = SharedPatches(make_patches, 1 << 20, str(tmp_path))
    images = [make_image("a"), make_image("b", 3)]
    data = refer_request(BODY, [shared.place(image) for image in images])
    body, found = resolve_request(data)
    assert body == BODY
    wanted = [make_patches(image) for image in images]
    assert torch.equal(found.pixels_PD, torch.cat([each.pixels_PD for each in wanted]))
    assert found.grids_I3.tolist() == [list(each.grid) for each in wanted]
    assert found.intervals().tolist() == [each.interval for each in wanted]


def referred(path: str, grid: Any = (1, 2, 4)) -> bytes:
    return refer_request(BODY, [PlacedPatches("ab", path, (8, 6), grid)])


def test_a_file_on_another_machine_is_missed() -> None:
    with pytest.raises(FileNotFoundError, match=r"/nowhere/ab\.patches"):
        resolve_request(referred("/nowhere/ab.patches"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "not a request with patches"),
        (b"{}", "not a request with patches"),
        (b'{"patches": [{"path": 1}]}', "not a request with patches"),
        (b'{"patches": 3}', "not a request with patches"),
        (referred("/etc/passwd"), r"/etc/passwd is no file of patches, \*.patches"),
    ],
)
def test_other_references_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_request(data)


def test_grids_must_describe_the_patches(tmp_path: Path) -> None:
    placed = SharedPatches(make_patches, 1 << 20, str(tmp_path)).place(make_image("a"))
    with pytest.raises(ValueError, match="8 patches, but the grids describe 6"):
        resolve_request(referred(placed.path, (1, 2, 3)))


def test_placeholders_must_be_those_of_the_images() -> None:
    check_placeholders(BODY, IMAGES.grids_I3, 90, 2)
    with pytest.raises(ValueError, match=r"2 placeholders \(token 90\) in the ids, but .* take 1"):
        check_placeholders({"input_ids": [5, 90, 6, 90]}, IMAGES.grids_I3, 90, 2)
    with pytest.raises(ValueError, match=r"0 placeholders \(token 90\)"):
        check_placeholders({"input_ids": [5]}, IMAGES.grids_I3, 90, 2)


def test_ids_must_not_end_with_the_beginning_of_an_image() -> None:
    """SGLang's search for images looks at the token behind it."""
    check_placeholders({"input_ids": [7, 90, 7, 6]}, IMAGES.grids_I3, 90, 2, start_id=7)
    with pytest.raises(ValueError, match=r"the ids end with token 7, which begins an image"):
        check_placeholders({"input_ids": [7, 90, 6, 7]}, IMAGES.grids_I3, 90, 2, start_id=7)
