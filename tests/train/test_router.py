"""Which balance losses count, and which experts a token is sent to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.train.router import ExpertChoice, balance_losses

SCORES_TE = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.26, 0.24, 0.25]])


def choose(given: list[list[int]] | None) -> tuple[ExpertChoice, Tensor, Tensor]:
    choice = ExpertChoice()
    choice.given_TK = None if given is None else torch.tensor(given)

    def best(scores_TE: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
        found = scores_TE.topk(topk)
        return found.values, found.indices

    return choice, *choice.get_replay_topk(SCORES_TE, 2, None, None, best)


def test_without_given_experts_the_best_are_taken() -> None:
    choice, scores_TK, experts_TK = choose(None)
    assert experts_TK[:2].tolist() == [[3, 2], [0, 1]]
    assert torch.equal(scores_TK, SCORES_TE.gather(1, experts_TK))
    assert torch.equal(choice.taken_TK, experts_TK) and torch.equal(choice.own_TK, experts_TK)


def test_given_experts_come_first_with_the_routers_own_scores() -> None:
    choice, scores_TK, experts_TK = choose([[0, 1], [-1, -1], [2, 3]])
    assert experts_TK.tolist() == [[0, 1], [0, 1], [2, 3]]
    assert scores_TK.tolist() == [
        pytest.approx([0.1, 0.2]),
        pytest.approx([0.4, 0.3]),
        pytest.approx([0.24, 0.25]),
    ]
    assert choice.own_TK[:2].tolist() == [[3, 2], [0, 1]]
    assert torch.equal(choice.taken_TK, experts_TK)


@pytest.mark.parametrize(
    ("coefs", "wanted"),
    [
        ([0.0, 0.0], []),
        ([0.1, 0.0], ["aux_loss"]),
        ([0.1, 0.2], ["aux_loss", "seq_aux_loss"]),
    ],
)
def test_balance_losses_without_a_coefficient_do_not_count(
    coefs: list[float], wanted: list[str]
) -> None:
    config: Any = SimpleNamespace(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=coefs
    )
    assert balance_losses(config) == wanted
