"""Ranks hold what the plan of low-rank factors says, in every kind of layout."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlanConfig,
    TrainConfig,
)
from mcore_rl.planning.adapter_memory import count_adapter
from mcore_rl.planning.memory import _predict_training
from mcore_rl.train.offload import TRAINING, WEIGHTS, _gradients
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_each, run_ranks
from tests.support.peak_allocations import PeakAllocations
from tests.support.tiny_training import (
    LENS,
    make_actor,
    make_batches,
    token_loss,
    write_hf_model,
)

LORA = LoraConfig(rank=32, alpha=32)
LARGE = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_experts": 16,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [],
}
LAYOUTS: list[dict[str, Any]] = [{"dp": 2, "ep": 1}, {"tp": 2}, {"ep": 2}, {"pp": 2}]


def measure(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Any:
    """Return bytes: frozen on the host, gradients, all that is held, and the prediction."""
    parallel = ParallelConfig(**layout)
    options: dict[str, Any] = {"lora": LORA, "router_aux_loss_coef": 0.0}
    actor = make_actor(rank, world_size, port, model, parallel, OptimizerConfig(), **options)
    assert actor._adapter is not None
    host = sum(base.nbytes for base in actor._adapter.frozen.copies.values())
    actor.hold({WEIGHTS})
    weights = actor.held_bytes
    actor.hold({WEIGHTS, TRAINING})
    gradients = sum(gradient.nbytes for gradient in _gradients(actor.chunks))
    return weights, gradients, actor.held_bytes - weights - gradients, host


def predict(model: ModelConfig, layout: Any, stage: int) -> Any:
    parallel = ParallelConfig(**layout)
    hf_config = read_hf_config(model.path)
    train = TrainConfig(lora=LORA)
    uses = _predict_training(
        hf_config, "float32", parallel, train, plan=PlanConfig(expert_load=1.0)
    )[stage]
    sizes = MegatronSizes.from_config(parallel, hf_config)
    megatron = MegatronLayout(family_of(hf_config), hf_config, sizes, "float32")
    adapter = count_adapter(hf_config, megatron, sizes, stage, LORA)
    gradients = uses["gradients"] - 4 * adapter.layer
    return uses["weights"], gradients, uses["optimizer"], 4 * adapter.frozen


@pytest.mark.gloo
def test_a_rank_holds_what_is_predicted(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path / "model")))
    for layout, ranks in zip(LAYOUTS, run_each(measure, 2, LAYOUTS, model), strict=True):
        for rank, measured in enumerate(ranks):
            predicted = predict(model, layout, rank if layout.get("pp") else 0)
            names = ("weights", "gradients", "optimizer", "frozen")
            for name, got, want in zip(names, measured, predicted, strict=True):
                assert want == pytest.approx(got, rel=0.01), (layout, rank, name)
            assert predicted[3] == measured[3]


def measure_step(rank: int, world_size: int, port: int, model: ModelConfig) -> tuple[int, int]:
    """Return the bytes that are held between steps, and the most that a step has besides."""
    options: dict[str, Any] = {"lora": LORA, "router_aux_loss_coef": 0.0}
    actor = make_actor(
        rank, world_size, port, model, ParallelConfig(), OptimizerConfig(), **options
    )
    batches = make_batches()[1:2]

    def step() -> None:
        actor.train_step(batches, token_loss, temperature=1.0, num_tokens=sum(LENS[1]))

    step()  # makes the optimizer's state
    with PeakAllocations() as allocations:
        step()
    return actor.held_bytes, allocations.peak_bytes


@pytest.mark.gloo
def test_a_step_takes_what_is_predicted(tmp_path: Path) -> None:
    """The gradients of a layer's experts, all at once, are most of what a step takes besides."""
    model = ModelConfig(path=str(write_hf_model(tmp_path / "model", **LARGE)))
    [(held, beside)] = run_ranks(measure_step, 1, model)
    train = TrainConfig(lora=LORA, max_tokens_per_microbatch=sum(LENS[1]))
    [uses] = _predict_training(
        read_hf_config(model.path),
        "float32",
        ParallelConfig(),
        train,
        plan=PlanConfig(expert_load=1.0),
    )
    assert sum(uses.values()) == pytest.approx(held + beside, rel=0.05)
    besides = sum(uses.values()) - held
    assert besides == pytest.approx(beside, rel=0.05) and besides > 0.15 * held
