"""Options of megatron-core that a recipe passes on: they change how a step runs, not what it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.optimizer import parts_of
from tests.support.distributed import run_each, run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
PLAIN: dict[str, Any] = {}
BFLOAT16_MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("model"))))


def two_steps(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    layout: dict[str, Any],
    train: dict[str, Any],
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the stats of two steps and this rank's weights after them."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **train)
    stats = [
        actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        for _ in range(2)
    ]
    return stats, {name: tensor.clone() for name, tensor in actor.weight_layout()[1].items()}


def check_same(results: list[Any], wanted: list[Any], case: object) -> None:
    """Compare but for the order in which floats are added."""
    for (stats, weights), (stats_wanted, weights_wanted) in zip(results, wanted, strict=True):
        for got, want in zip(stats, stats_wanted, strict=True):
            if want is not None:
                assert got.loss == pytest.approx(want.loss, abs=1e-5), case
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), case
                assert got.metrics == pytest.approx(want.metrics, abs=1e-4), case
        assert weights.keys() == weights_wanted.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, weights_wanted[name], rtol=0, atol=2e-5)


def test_recomputed_modules_give_the_same_weights(model: ModelConfig) -> None:
    cases = [{"recompute": modules} for modules in (*MODULES, "+".join(MODULES))]
    wanted, *results = run_each(two_steps, 1, [PLAIN, *cases], model, PLAIN)
    for case, result in zip(cases, results, strict=True):
        check_same(result, wanted, case)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 2, "ep": 1}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 1}, marks=pytest.mark.slow),
        {"ep": 2},
    ],
    ids=str,
)
def test_overlapped_reduction_gives_the_same_weights(
    model: ModelConfig, layout: dict[str, Any]
) -> None:
    overlapped = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 4096}}
    wanted, results = run_each(two_steps, 2, [PLAIN, overlapped], model, layout)
    check_same(results, wanted, layout)


def steps_with_a_save(
    rank: int,
    world_size: int,
    port: int,
    megatron: dict[str, Any],
    model: ModelConfig,
    folder: Path,
) -> list[dict[str, torch.Tensor]]:
    """Return the weights after a second step; likewise after a second step from a checkpoint."""
    optimizer = OptimizerConfig(lr=1e-3, megatron=megatron)
    actor = make_actor(rank, world_size, port, model, ParallelConfig(ep=2), optimizer)

    def step() -> dict[str, torch.Tensor]:
        actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        return {name: tensor.clone() for name, tensor in actor.weight_layout()[1].items()}

    step()
    actor.hold(())
    actor.save(folder, {})
    actor.finish_save()
    actor.hold(("weights", "training"))
    second = step()
    actor.load(folder)
    actor.hold(())  # also what the load has put into new memory
    assert not any(tensor.untyped_storage().nbytes() for tensor in optimizer_tensors(actor))
    actor.hold(("weights", "training"))
    return [second, step()]


def optimizer_tensors(actor: Any) -> list[torch.Tensor]:
    return [
        value
        for part in parts_of(actor.optimizer)
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_bfloat16_moments_train_and_continue_from_a_checkpoint(
    model: ModelConfig, tmp_path: Path, dtype: Any
) -> None:
    typed = ModelConfig(path=model.path, dtype=dtype)
    results = run_ranks(steps_with_a_save, 2, BFLOAT16_MOMENTS, typed, tmp_path / "step_1")
    exact = run_ranks(steps_with_a_save, 2, PLAIN, typed, tmp_path / "exact_step_1")
    for (first, second), (exact_first, _) in zip(results, exact, strict=True):
        for name, weight in first.items():
            assert torch.equal(weight, second[name]), name
        assert any(not torch.equal(first[name], exact_first[name]) for name in first)
        for name, weight in first.items():
            torch.testing.assert_close(weight, exact_first[name], rtol=0.02, atol=3e-4)
