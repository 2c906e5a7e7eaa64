"""Models of a lone rank: their size on a GPU, its batch, and that comparisons can fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_rl.doctor import lone_rank
from mcore_rl.slices.families import family_of, refuse_unsupported


@pytest.mark.parametrize("make", [lone_rank.qwen3_moe, lone_rank.deepseek_v3])
def test_the_models_of_a_gpu_have_between_one_and_three_billion_parameters(
    make: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_unsupported(make(), "config.json")
    monkeypatch.setattr(lone_rank, "has_cuda", lambda: True)
    config = make()
    refuse_unsupported(config, "config.json")
    shapes = family_of(config).shapes(config).values()
    assert 1e9 < sum(torch.Size(shape).numel() for shape in shapes) < 3e9


def test_the_batch_has_unequal_sequences_whose_first_tokens_are_not_trained() -> None:
    batch = lone_rank.make_batch(256, 128)
    assert sum(batch.lens_N) == len(batch.token_ids_T) == 256
    assert len(set(batch.lens_N)) > 1
    assert int((~batch.loss_mask_T).sum()) == len(batch.lens_N)
    assert batch.loss_weights_T is not None and float(batch.loss_weights_T.sum()) == pytest.approx(
        1
    )


def test_a_parameter_that_differs_is_named() -> None:
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    lone_rank.expect_same(ones, {"a": torch.ones(2)})
    with pytest.raises(AssertionError, match=r"1 parameters differ, first \['b'\]"):
        lone_rank.expect_same(ones, {"a": torch.ones(2), "b": torch.zeros(2)})
