"""Indexers learn from a loss of their own, in every layout, and the policy learns as without it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from tests.support.distributed import run_each
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.indexer_losses import compute_losses
from tests.support.indexers import load_oracle, with_random_keys
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
)

TOPK = 6
COEF = 0.5
CLIP = 0.05
"""Far below the norm of any gradient here."""
TOLERANCE = 2e-6
"""Share of the largest gradient. Rounding to float32 alone is 1.1e-6 of it."""
Case = tuple[str, dict[str, Any], str, str, float]
"""(model, layout, recompute, indexer_replay, indexer_loss)"""
ALONE: list[Case] = [
    ("deepseek_v32", {}, "none", "none", 0.0),
    ("deepseek_v32", {}, "none", "none", COEF),
    ("deepseek_v32", {}, "none", "engine", COEF),
    ("glm5", {}, "none", "none", COEF),
]
QUICK: list[Case] = [
    ("deepseek_v32", {"tp": 2, "ep": 2}, "full", "engine", COEF),
    ("deepseek_v32", {"tp": 2, "ep": 2}, "full", "none", COEF),
    ("deepseek_v32", {"tp": 2, "ep": 2}, "full", "none", 0.0),
]
FURTHER: list[Case] = [
    ("deepseek_v32", {"tp": 2, "pp": 2, "ep": 2}, "none", "engine", COEF),
    ("deepseek_v32", {"pp": 2, "vpp": 2, "ep": 2}, "full", "engine", COEF),
    ("deepseek_v32", {"tp": 2, "cp": 2, "ep": 4}, "core_attn", "engine", COEF),
    ("deepseek_v32", {"tp": 2, "cp": 2, "ep": 4}, "none", "none", COEF),
    ("glm5", {"cp": 2, "dp": 2}, "none", "none", COEF),
]


def run_case(rank: int, world_size: int, port: int, folder: Path, case: Case) -> dict[str, Any]:
    """Return the stats of a step, its gradients, and this rank's weights after it."""
    kind, layout, recompute, mode, coef = case
    actor = make_actor(
        rank,
        world_size,
        port,
        ModelConfig(path=str(folder / kind)),
        ParallelConfig(**layout),
        OptimizerConfig(lr=1e-3, clip_grad=CLIP),
        recompute=recompute,
        indexer_replay=mode,
        indexer_loss=coef,
    )
    batches = my_batches(with_random_keys(make_batches(), TOPK))
    shards, tensors = actor.weight_layout()
    before = {f"{s.box}": s.view(tensors).clone() for s in shards if ".indexer." in s.box.name}
    step = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    weights = {f"{s.box}": s.view(tensors).clone() for s in shards}
    return {
        "step": step,
        "gradients": boxed_gradients(actor),
        "weights": weights,
        "learned": {name for name, old in before.items() if not torch.equal(old, weights[name])},
        "indexers": set(before),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexer_losses")
    for kind in ("deepseek_v32", "glm5"):
        write_model(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def exact(folder: Path) -> Mapping[tuple[str, str], tuple[Tensor, dict[str, Tensor]]]:
    """Losses of layers and gradients of their sum, in float64, by model and replay."""
    batches = with_random_keys(make_batches(), TOPK)
    return {
        (kind, mode): compute_losses(load_oracle(folder / kind), batches, replay=mode == "engine")
        for kind, *_, mode, coef in ALONE
        if coef
    }


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    return [result for (result,) in run_each(run_case, 1, ALONE, folder)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, QUICK), id="two_ranks", marks=pytest.mark.slow),
        pytest.param((4, FURTHER), id="four_ranks", marks=pytest.mark.slow),
    ],
)
def cut(folder: Path, request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, Any]]]]:
    num_ranks, cases = request.param
    return list(zip(cases, run_each(run_case, num_ranks, cases, folder), strict=True))


def check_indexers(exact: Any, case: Case, ranks: list[dict[str, Any]]) -> None:
    """Compare losses and, before clipping, gradients with those in float64."""
    kind, _, _, mode, coef = case
    losses_L, gradients = exact[kind, mode]
    stats = [rank["step"] for rank in ranks if rank["step"] is not None]
    norm = COEF * sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    for step in stats:
        assert step.metrics["indexer/loss"] == pytest.approx(float(losses_L.mean()), rel=1e-5)
        for layer, loss in enumerate(losses_L.tolist()):
            got = step.metrics[f"indexer/layer_{layer:02d}/loss"]
            assert got == pytest.approx(loss, rel=1e-5), case
        assert step.metrics["indexer/grad_norm"] == pytest.approx(norm, rel=1e-5), case
    clipped = {name: coef * g * min(1.0, CLIP / norm) for name, g in gradients.items()}
    boxed = [
        [(box, g) for box, g in rank["gradients"] if ".indexer." in box.name] for rank in ranks
    ]
    check_gradients(boxed, clipped, case, TOLERANCE)
    for rank in ranks:
        assert rank["learned"] == rank["indexers"], case


@pytest.mark.gloo
def test_indexers_learn_by_the_formula(exact: Any, alone: Any) -> None:
    for case, result in zip(ALONE, alone, strict=True):
        if case[-1]:
            check_indexers(exact, case, [result])
    losses = [float(exact["deepseek_v32", mode][0].mean()) for mode in ("none", "engine")]
    assert abs(losses[0] - losses[1]) > 1e-4, "a replay makes no difference to the loss"


@pytest.mark.gloo
def test_layouts_teach_indexers_alike(exact: Any, alone: Any, cut: Any) -> None:
    whole = {(case[0], *case[3:]): result for case, result in zip(ALONE, alone, strict=True)}
    for case, ranks in cut:
        if case[-1]:
            check_indexers(exact, case, ranks)
        one_process = whole[case[0], *case[3:]]
        for step in (rank["step"] for rank in ranks if rank["step"] is not None):
            assert step.loss == pytest.approx(one_process["step"].loss, abs=1e-6), case
        wanted = whole_gradients(one_process["gradients"])
        check_gradients([rank["gradients"] for rank in ranks], wanted, case, TOLERANCE)


def check_policy(without: dict[str, Any], trained: dict[str, Any]) -> None:
    """Compare gradients and weights of all but the indexers, bit for bit."""
    gradients = {f"{box}": gradient for box, gradient in trained["gradients"]}
    for box, gradient in without["gradients"]:
        assert torch.equal(gradients[f"{box}"], gradient), box
    for name in without["weights"].keys() - without["indexers"]:
        assert torch.equal(trained["weights"][name], without["weights"][name]), name
    assert not without["learned"]
    if without["step"] is not None:
        assert trained["step"].grad_norm == without["step"].grad_norm > 2 * CLIP
        assert trained["step"].loss == without["step"].loss
        assert "indexer/loss" not in without["step"].metrics


@pytest.mark.gloo
def test_the_policy_learns_bit_for_bit_as_without_it(alone: Any, cut: Any) -> None:
    check_policy(alone[0], alone[1])
    if cut[0][0] == QUICK[0]:
        _, (_, trained), (_, without) = cut
        for pair in zip(without, trained, strict=True):
            check_policy(*pair)
