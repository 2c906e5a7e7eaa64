"""Requests with images survive their packing; anything else is refused by name."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mcore_rl.rollout.image_request import pack_request, processor_output, unpack_request
from mcore_rl.types import Images

BODY = {"input_ids": [5, 90, 6], "sampling_params": {"temperature": 1.0}}
IMAGES = Images(torch.arange(12.0).reshape(4, 3), torch.tensor([[1, 2, 2]]), (1,))


def test_a_request_survives() -> None:
    body, pixels_PD, grids_I3 = unpack_request(pack_request(BODY, IMAGES))
    assert body == BODY
    assert torch.equal(pixels_PD, IMAGES.pixels_PD)
    assert torch.equal(grids_I3, IMAGES.grids_I3)
    [item] = processor_output(body, pixels_PD, grids_I3)
    assert item["input_ids"].tolist() == BODY["input_ids"]


def packed(**changes: Any) -> bytes:
    request = torch.tensor(list(json.dumps(BODY).encode()), dtype=torch.uint8)
    tensors = {"request": request, "pixels": IMAGES.pixels_PD, "grids": IMAGES.grids_I3}
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
        (packed(pixels=torch.zeros(4)), r"expected \[P, D\] and \[I, 3\]"),
        (packed(grids=torch.tensor([[1, -2, -2]])), r"expected \[P, D\] and \[I, 3\]"),
        (packed(grids=torch.zeros(0, 3, dtype=torch.int64)), r"expected \[P, D\] and \[I, 3\]"),
        (packed(pixels=torch.zeros(5, 3)), "5 patches, but the grids describe 4"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_request(data)
