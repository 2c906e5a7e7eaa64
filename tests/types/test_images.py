"""Images of a batch must agree in their numbers of patches, images and sequences."""

import pytest
import torch

from mcore_rl.types import TrainBatch
from mcore_rl.types.images import Images

GRIDS = torch.tensor([[1, 2, 2], [1, 2, 4]])


def test_patches_and_images_must_agree() -> None:
    Images(torch.zeros(12, 3), GRIDS, (1, 1))
    with pytest.raises(ValueError, match="11 patches"):
        Images(torch.zeros(11, 3), GRIDS, (1, 1))
    with pytest.raises(ValueError, match="3 images of sequences"):
        Images(torch.zeros(12, 3), GRIDS, (1, 2))


def test_a_batch_has_a_number_of_images_for_each_sequence() -> None:
    images = Images(torch.zeros(12, 3), GRIDS, (1, 1))
    ids_T = torch.zeros(4, dtype=torch.int64)
    TrainBatch(ids_T, ids_T > 0, (2, 2), images=images)
    with pytest.raises(ValueError, match="of 2 sequences, lens_N names 1"):
        TrainBatch(ids_T, ids_T > 0, (4,), images=images)
