"""Quantized values come out bit for bit as the whole tensor computed at once, in bands of any
size.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint_tools.packed import Packed
from checkpoint_tools.reader import Reader
from checkpoint_tools.stored import Chunk
from checkpoint_tools.unpack import unpack_tensor


def write_chunk(path: Path, tensor: Tensor) -> Chunk:
    path.write_bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Chunk(path.name, dtype, (0,) * len(shape), shape, str(path), 0, tensor.nbytes, False)


def unpack(packed: Packed, band_bytes: int) -> Tensor:
    """Return the elements as bytes, after checking that each stored byte is read once."""
    reader = Reader(scratch_bytes=1000)
    content = b"".join(bytes(part) for part in unpack_tensor(packed, reader, band_bytes))
    read = reader.take_record().read
    reader.close()
    for chunk in (packed.values, packed.scales):
        assert sum(span.num_bytes for span in read[chunk.path]) == chunk.num_bytes
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def random_bytes(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("band_bytes", [4, 2000, 1 << 20])
def test_blocks_of_8_bit_values_times_their_scales(tmp_path: Path, band_bytes: int) -> None:
    values = random_bytes(9, 10)
    values[values & 0x7F == 0x7F] = 0  # not a number
    values = values.view(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    value_chunk = write_chunk(tmp_path / "values", values)
    scale_chunk = write_chunk(tmp_path / "scales", scales)
    packed = Packed("w", "bfloat16", (9, 10), value_chunk, scale_chunk, "fp8", (4, 7))
    factors = scales.repeat_interleave(4, 0).repeat_interleave(7, 1)[:9, :10]
    expected = (values.float() * factors).to(torch.bfloat16)
    assert torch.equal(unpack(packed, band_bytes), expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize("band_bytes", [4, 2000, 1 << 20])
def test_groups_of_4_bit_values_as_transformers_converts_them(
    tmp_path: Path, band_bytes: int
) -> None:
    blocks = random_bytes(2, 6, 3, 16)
    scales = random_bytes(2, 6, 3)
    value_chunk = write_chunk(tmp_path / "values", blocks)
    scale_chunk = write_chunk(tmp_path / "scales", scales)
    packed = Packed("e", "float32", (2, 96, 6), value_chunk, scale_chunk, "mxfp4", (1, 32))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    assert expected.shape == (2, 96, 6)
    assert torch.equal(unpack(packed, band_bytes), expected.view(-1).view(torch.uint8))
