"""Muon's steps are those of its definition in every layout, and its state goes to any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import whole_gradients
from tests.support.optimizer_layouts import name_of, read, resume, take_steps
from tests.support.tiny_training import make_actor, write_hf_model

LR = 1e-3
EPS = 1e-6
"""Adam's. With a smaller one it would make a whole step of the rounding of a gradient near 0."""
MUON = OptimizerConfig(
    name="muon", lr=LR, eps=EPS, clip_grad=0.0, megatron={"muon_fp32_matmul_prec": "highest"}
)
CASES = [
    pytest.param([{"tp": 2, "ep": 2}, {"dp": 2, "ep": 1}], (1, {}, "tp2_ep2"), id="experts"),
    pytest.param(
        [
            {"tp": 2},
            {"tp": 2, "etp": 2},
            {"ep": 2},
            {"pp": 2, "vpp": 2},
        ],
        (2, {"dp": 2, "ep": 1}, "pp2_vpp2"),
        id="further",
        marks=pytest.mark.slow,
    ),
]
"""(layouts, (number of ranks, layout, whose checkpoint these resume))"""
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of the five iterations, as published with https://github.com/KellerJordan/modded-nanogpt."""


def refuse(rank: int, world_size: int, port: int, model: ModelConfig, saved: Path) -> str:
    """Return what an Adam says to a checkpoint of Muon."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig())
    with pytest.raises(ValueError) as raised:
        actor.load(saved)
    return str(raised.value)


def check_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        difference = (got[name] - value).abs().max()
        assert difference <= 2e-6, f"{where}, {name}: {difference}"


def make_orthogonal(gradient: Tensor) -> Tensor:
    """Five Newton-Schulz iterations, in float64."""
    x = gradient.double()
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / x.norm()
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("muon") / "model")))


@pytest.fixture(scope="module")
def one_process(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("steps")
    return root, run_ranks(take_steps, 1, model, root, MUON, {})[0]


@pytest.fixture(scope="module")
def first_step(model: ModelConfig, one_process: tuple[Path, Any]) -> tuple[dict[str, Tensor], ...]:
    """Return the gradients of one process's first step, and the weights before and after it."""
    root, (boxed, _) = one_process
    return whole_gradients(boxed), read(Path(model.path)), read(root / "one" / "first")


def test_a_first_step_is_that_of_the_definition(first_step: tuple[dict[str, Tensor], ...]) -> None:
    gradients, before, after = first_step
    attention, expert = "model.layers.0.self_attn", "model.layers.2.mlp.experts.3"
    fused = [f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"]
    singles = [f"{attention}.{name}_proj.weight" for name in "qkvo"]
    for names in (*([name] for name in singles), fused, [f"{expert}.down_proj.weight"]):
        gradient = torch.cat([gradients[name] for name in names])
        update = make_orthogonal(gradient) * max(gradient.shape) ** 0.5 * 0.2
        change = torch.cat([after[name] - before[name] for name in names])
        torch.testing.assert_close(change.double(), -LR * update, rtol=0, atol=1e-6, msg=str(names))


def test_embeddings_norms_routers_and_the_output_layer_are_adams(
    first_step: tuple[dict[str, Tensor], ...],
) -> None:
    gradients, before, after = first_step
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate.weight",
    ):
        # Adam's first step has the size of the learning rate wherever there is a gradient.
        gradient = gradients[name]
        assert (gradient.abs() > 10 * EPS).any(), name
        wanted = -LR * gradient / (gradient.abs() + EPS)
        torch.testing.assert_close(after[name] - before[name], wanted, rtol=0, atol=2e-6, msg=name)


def test_a_run_does_not_go_on_with_another_optimizer(
    model: ModelConfig, one_process: tuple[Path, Any]
) -> None:
    saved = one_process[0] / "one" / "checkpoint"
    [error] = run_ranks(refuse, 1, model, saved)
    assert error.startswith(f"{saved} has the state of optimizer.name=muon, and this run's is adam")


@pytest.mark.gloo
@pytest.mark.parametrize(("layouts", "resumed"), CASES)
def test_layouts_agree_with_one_process_and_resume_in_each_other(
    model: ModelConfig,
    one_process: tuple[Path, Any],
    layouts: list[dict[str, Any]],
    resumed: tuple[int, dict[str, Any], str],
) -> None:
    root, (_, wanted) = one_process
    last = read(root / "one" / "last")
    per_layout = run_each(take_steps, 2, layouts, model, root, MUON)
    for layout, results in zip(layouts, per_layout, strict=True):
        check_equal(read(root / name_of(layout) / "last"), last, name_of(layout))
        stats = next(stats for _, stats in results if stats[0] is not None)
        for got, want in zip(stats, wanted, strict=True):
            assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), layout
    num_ranks, layout, saved = resumed
    run_ranks(resume, num_ranks, model, root, MUON, layout, saved)
    name = f"{saved}_in_{name_of(layout)}"
    check_equal(read(root / name), last, name)
