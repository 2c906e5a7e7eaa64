"""Token weights: the published sums, and their independence of how a mini-batch is cut."""

import pytest
import torch

from mcore_rl.algo.aggregation import AGGREGATIONS, loss_weights

LENS = (4, 2, 5, 3)
MASK = torch.tensor(
    [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0], dtype=torch.bool
)  # 2, 0, 4 and 1 trained tokens
MAX_LEN = 8


def expected_loss(kind: str, loss_T: torch.Tensor) -> float:
    responses = [
        piece[mask].double().tolist()
        for piece, mask in zip(loss_T.split(LENS), MASK.split(LENS), strict=True)
    ]
    if kind == "token_mean":
        return sum(map(sum, responses)) / sum(map(len, responses))
    if kind == "sequence_mean":
        means = [sum(r) / len(r) for r in responses if r]
        return sum(means) / len(means)
    if kind == "token_sum":
        return sum(map(sum, responses))
    assert kind == "constant"
    return sum(map(sum, responses)) / (len(responses) * MAX_LEN)


@pytest.mark.parametrize("kind", AGGREGATIONS.names)
def test_equals_the_published_sum(kind: str) -> None:
    loss_T = torch.randn(sum(LENS), generator=torch.Generator().manual_seed(0))
    weights_T = loss_weights(kind, MASK, LENS, MAX_LEN)
    assert weights_T.dtype == torch.float32
    assert not weights_T[~MASK].any()
    assert (weights_T * loss_T).sum().item() == pytest.approx(expected_loss(kind, loss_T), rel=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS.names)
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]], [[1], [3, 0, 2]]]
)
def test_the_gradient_does_not_depend_on_micro_batches(kind: str, split: list[list[int]]) -> None:
    weights = loss_weights(kind, MASK, LENS, MAX_LEN).double().split(LENS)
    features = torch.randn(
        sum(LENS), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((torch.cat(weights) * (features @ theta).sin()).sum(), theta)
    for microbatch in split:
        inputs_TF = torch.cat([features.split(LENS)[i] for i in microbatch])
        weights_T = torch.cat([weights[i] for i in microbatch])
        (weights_T * (inputs_TF @ theta).sin()).sum().backward()
    torch.testing.assert_close(theta.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", AGGREGATIONS.names)
def test_nothing_to_train_weighs_nothing(kind: str) -> None:
    weights_T = loss_weights(kind, torch.zeros(5, dtype=torch.bool), (2, 3), MAX_LEN)
    assert weights_T.tolist() == [0.0] * 5


def test_refusals() -> None:
    with pytest.raises(ValueError, match="max_response_len >= 1, got None"):
        loss_weights("constant", MASK, LENS)
    with pytest.raises(ValueError, match=r"aggregation='mean'"):
        loss_weights("mean", MASK, LENS)
    with pytest.raises(ValueError, match=r"\(14,\), lens_N sum to 9"):
        loss_weights("token_mean", MASK, (4, 5))
