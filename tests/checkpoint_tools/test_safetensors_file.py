"""Headers agree with the safetensors library in both directions; damaged ones are refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.safetensors_file import NAMES, make_header, read_header


def test_the_library_reads_what_is_laid_out_here(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, 5).to(getattr(torch, name)) for name in NAMES.values()}
    tensors["empty"] = torch.ones(0, 4)
    layout = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    header, starts, num_bytes = make_header(layout)
    content = bytearray(num_bytes)
    content[: len(header)] = header
    for name, tensor in tensors.items():
        if tensor.numel():
            data = tensor.view(torch.uint8).numpy().tobytes()
            content[starts[name] : starts[name] + len(data)] = data
        assert starts[name] % tensor.element_size() == 0
    path = tmp_path / "file"
    path.write_bytes(content)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name].float(), tensors[name].float()) for name in tensors)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    tensors = read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("bfloat16", (4,)),
    }
    chunk = tensors["a"].chunks[0]
    data = path.read_bytes()[chunk.start : chunk.start + chunk.num_bytes]
    assert data == torch.ones(2, 3).numpy().tobytes()


def entry(start: int, stop: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop], **changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[]", "it is not a JSON object"),
        ("{{", "its header is damaged"),
        ('{"a": 1, "a": 1}', "'a' is in it twice"),
        ({"a": entry(0, 5)}, "last tensor 'a' ends at byte .*: the rest belongs to nothing"),
        ({"a": entry(0, 11)}, "last tensor 'a' ends at byte .*: it was truncated"),
        ({"a": entry(0, 6), "b": entry(5, 10)}, "tensor 'b' at byte .* overlaps"),
        ({"a": entry(0, 5), "b": entry(6, 10)}, "tensor 'b' at byte .* leaves bytes"),
        ({"a": entry(0, 10, shape=[3])}, "'a' of U8 .* has 10 bytes, it should have 3"),
        ({"a": entry(0, 10, dtype="U9")}, "tensor 'a' is damaged, or its dtype unknown"),
        ({"a": entry(0, 10, shape=[-10])}, "tensor 'a' is damaged, or its dtype unknown"),
        ({"a": {}}, "tensor 'a' is damaged: KeyError"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(10))
    with pytest.raises(ValueError, match=message):
        read_header(path)


def test_a_file_shorter_than_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", 1000) + b"{}")
    with pytest.raises(ValueError, match="was truncated, or is not a safetensors file"):
        read_header(path)
