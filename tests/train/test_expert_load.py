"""Loads of experts: what is counted, what is reduced, and the metrics of even and uneven loads."""

import math

import pytest
import torch
from torch import Tensor

from mcore_rl.train.routing import StepLoad, load_metrics
from tests.support.distributed import run_alone

FIRST = torch.tensor([[True, False, True], [True, True, False]])


def count_a_step() -> tuple[Tensor, dict[str, float], Tensor]:
    load = StepLoad(num_layers=2, num_experts=3)
    load.count(2, FIRST, padding_T=None)
    load.count(2, FIRST, padding_T=torch.tensor([False, True]))
    load.add_loss("aux_loss", 1, torch.tensor(0.5))
    load.add_loss("aux_loss", 2, torch.tensor(0.25))
    load.add_loss("aux_loss", 2, torch.tensor(0.25))
    load_LE, losses = load.reduce(["aux_loss", "seq_aux_loss"])
    load.clear()
    cleared_LE, _ = load.reduce([])
    return load_LE, losses, cleared_LE


def test_tokens_but_no_padding_are_counted_until_the_load_is_cleared() -> None:
    load_LE, losses, cleared_LE = run_alone(count_a_step)
    assert load_LE.tolist() == [[0, 0, 0], [3, 1, 2]]
    assert losses == {"aux_loss": 1.0, "seq_aux_loss": 0.0}
    assert not cleared_LE.any()


@pytest.mark.parametrize(
    ("layer", "max_violation", "idle_share", "load_entropy"), [(0, 0, 0, 1), (2, 3, 0.75, 0)]
)
def test_even_idle_and_lopsided_loads_are_told_apart(
    layer: int, max_violation: float, idle_share: float, load_entropy: float
) -> None:
    load_LE = torch.tensor([[5.0, 5.0, 5.0, 5.0], [9.0, 9.0, 9.0, 9.0], [0.0, 0.0, 0.0, 8.0]])
    metrics = load_metrics(load_LE, [1, 0, 1])
    prefix = f"router/layer_{layer:02d}"
    assert metrics[f"{prefix}/max_violation"] == max_violation
    assert metrics[f"{prefix}/idle_share"] == idle_share
    assert metrics[f"{prefix}/load_entropy"] == pytest.approx(load_entropy)
    assert metrics["router/max_violation"] == 1.5
    assert metrics["router/max_violation_max"] == 3
    assert not [name for name in metrics if "layer_01" in name], "layer 1 is dense"


def test_a_layer_without_tokens_has_metrics() -> None:
    metrics = load_metrics(torch.zeros(3, 4), [1, 0, 1])
    assert not any(math.isnan(value) for value in metrics.values())
