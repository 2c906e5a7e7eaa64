"""Ranks hold what the plan of low-rank factors says, in every kind of layout."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.planning.adapter_memory import count_adapter
from mcore_rl.planning.memory import _predict_training
from mcore_rl.train.offload import TRAINING, WEIGHTS, _gradients
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_each
from tests.support.tiny_training import make_actor, write_hf_model

LORA = LoraConfig(rank=32, alpha=32)
LAYOUTS: list[dict[str, Any]] = [{"dp": 2, "ep": 1}, {"tp": 2}, {"ep": 2}, {"pp": 2}]


def measure(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Any:
    """Return bytes: frozen on the host, gradients, all that is held, and the prediction."""
    parallel = ParallelConfig(**layout)
    options: dict[str, Any] = {"lora": LORA, "router_aux_loss_coef": 0.0}
    actor = make_actor(rank, world_size, port, model, parallel, OptimizerConfig(), **options)
    assert actor._adapter is not None
    host = sum(base.nbytes for base in actor._adapter._base.values())
    actor.hold({WEIGHTS})
    weights = actor.held_bytes
    actor.hold({WEIGHTS, TRAINING})
    gradients = sum(gradient.nbytes for gradient in _gradients(actor.chunks))
    return weights, gradients, actor.held_bytes - weights - gradients, host


def predict(model: ModelConfig, layout: Any, stage: int) -> Any:
    parallel = ParallelConfig(**layout)
    hf_config = read_hf_config(model.path)
    train = TrainConfig(lora=LORA)
    uses = _predict_training(hf_config, "float32", parallel, train, expert_load=1.0)[stage]
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
