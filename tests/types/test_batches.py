"""A batch whose fields do not fit its sequences is refused."""

from typing import Any

import pytest
import torch

from mcore_rl.types.batches import TrainBatch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantages_T", torch.zeros(2)),
        ("advantages_T", torch.zeros(3, 1)),
        ("routed_experts_TLK", torch.zeros(3, 1)),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(name: str, value: Any) -> None:
    tokens: dict[str, Any] = {
        "token_ids_T": torch.zeros(3, dtype=torch.int64),
        "loss_mask_T": torch.ones(3, dtype=torch.bool),
        "lens_N": (1, 2),
    }
    assert set(TrainBatch(**tokens).token_fields()) == {"token_ids_T", "loss_mask_T"}
    with pytest.raises(ValueError, match=rf"TrainBatch.{name} has .*, lens_N sum to 3"):
        TrainBatch(**tokens, **{name: value})
