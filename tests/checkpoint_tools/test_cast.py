"""Elements are cast to the values of torch, and quantized with one scale per block."""

import pytest
import torch

from checkpoint_tools.cast import cast, quantize, view_bytes


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float64"])
def test_values_are_rounded_as_by_torch(to: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    result = torch.frombuffer(
        bytearray(cast(view_bytes(values), "float32", to)), dtype=getattr(torch, to)
    )
    assert torch.equal(result, values.to(getattr(torch, to)))


def test_blocks_are_scaled_to_the_range_of_8_bits() -> None:
    weights = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    values, scales = quantize(view_bytes(weights), "float32", 300)
    assert len(values) == 200 * 300
    scales_nk = torch.frombuffer(bytearray(scales), dtype=torch.float32).view(2, 3)
    largest = weights[:128, :128].abs().max()
    assert scales_nk[0, 0] * 448 == pytest.approx(largest.item(), rel=1e-6)
