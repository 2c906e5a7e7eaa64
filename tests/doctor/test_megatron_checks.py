"""The model of the megatron stage: its size on a GPU, and that its checks can fail."""

import pytest
import torch

from mcore_rl.doctor import megatron_checks
from mcore_rl.slices.families import family_of


def test_the_model_of_a_gpu_has_between_one_and_three_billion_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron_checks, "has_cuda", lambda: True)
    config = megatron_checks.model_config()
    shapes = family_of(config).shapes(config).values()
    assert 1e9 < sum(torch.Size(shape).numel() for shape in shapes) < 3e9


def test_the_batch_has_unequal_sequences_whose_first_tokens_are_not_trained() -> None:
    batch = megatron_checks._batch(256, 128)
    assert sum(batch.lens_N) == len(batch.token_ids_T) == 256
    assert len(set(batch.lens_N)) > 1
    assert int((~batch.loss_mask_T).sum()) == len(batch.lens_N)
    assert batch.loss_weights_T is not None and float(batch.loss_weights_T.sum()) == pytest.approx(
        1
    )


def test_a_parameter_that_differs_is_named() -> None:
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    megatron_checks._expect_same(ones, {"a": torch.ones(2)})
    with pytest.raises(AssertionError, match=r"1 parameters differ, first \['b'\]"):
        megatron_checks._expect_same(ones, {"a": torch.ones(2), "b": torch.zeros(2)})
