"""Sums of micro-batches and the loss and metrics of their step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.train.stats import reduce_sums, token_sums
from tests.support.distributed import run_alone

MASK_T = torch.tensor([False, True, True])


def sums(scale: float) -> dict[str, Tensor]:
    values_T = scale * torch.tensor([9.0, 1.0, 3.0])
    return token_sums(torch.tensor(scale), {"nll": values_T, "nll_max": values_T}, MASK_T, 4)


def test_tokens_outside_the_loss_mask_do_not_count() -> None:
    found = {name: value.item() for name, value in sums(2.0).items()}
    assert found == {"loss": 2.0, "num_masked": 2, "num_tokens": 4, "nll": 8.0, "nll_max": 6.0}


def test_a_report_holds_no_graph() -> None:
    values_T = torch.ones(3, requires_grad=True)
    found = token_sums(values_T.sum(), {"nll": values_T}, MASK_T, 3)
    assert not any(value.requires_grad for value in found.values())


def reduce(num_tokens: int) -> Any:
    return reduce_sums([sums(1.0), sums(2.0)], num_tokens)


def test_metrics_are_means_or_maxima_over_micro_batches() -> None:
    loss, metrics = run_alone(reduce, 8)
    assert loss == 3.0
    assert metrics == {"nll": pytest.approx(3.0), "nll_max": 6.0}


def test_a_step_scaled_for_another_number_of_tokens_is_noticed() -> None:
    with pytest.raises(AssertionError, match="scaled for 9 tokens, but its ranks had 8"):
        run_alone(reduce, 9)


def reduce_nothing(num_tokens: int) -> tuple[float, dict[str, float]]:
    """Sums of a micro-batch whose tokens are all off the loss mask."""
    value_T = torch.tensor([2.0, 5.0])
    mask_T = torch.zeros(2, dtype=torch.bool)
    report = token_sums(torch.tensor(0.0), {"nll": value_T, "nll_max": value_T}, mask_T, 2)
    return reduce_sums([report], num_tokens)


def test_without_a_token_on_the_mask_metrics_are_zero() -> None:
    """A maximum of nothing would be minus infinity, which metrics.jsonl cannot hold."""
    assert run_alone(reduce_nothing, 2) == (0.0, {"nll": 0.0, "nll_max": 0.0})
