"""Routing options that a model has no use for are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import TrainConfig
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models.recipe_checks import check_routing
from tests.support.tiny_models import write_model


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "qwen3",
            {"router_replay": "engine"},
            "train.router_replay=engine, but Qwen3ForCausalLM has no experts",
        ),
        (
            "llama",
            {"freeze_router": True},
            "train.freeze_router=True, but .* set train.freeze_router=false",
        ),
        (
            "qwen2",
            {"router_aux_loss_coef": 0.1},
            "train.router_aux_loss_coef=0.1, but .* has no experts",
        ),
        (
            "deepseek_v3",
            {"indexer_replay": "engine"},
            "train.indexer_replay=engine, but DeepseekV3ForCausalLM has no indexers",
        ),
        (
            "deepseek_v3",
            {"indexer_loss": 0.1},
            "train.indexer_loss=0.1, but DeepseekV3ForCausalLM has no indexers: set .*=0.0",
        ),
        (
            "deepseek_v3",
            {"mtp_loss": 0.1},
            "train.mtp_loss=0.1, but DeepseekV3ForCausalLM has no layers .*: set .*mtp_loss=0.0",
        ),
        ("qwen3_moe", {"router_bias_rate": 0.1}, "train.router_bias_rate=0.1, but .* have no bias"),
        ("deepseek_v2", {"router_bias_rate": 0.1}, "routers of DeepseekV2ForCausalLM have no bias"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    config = read_hf_config(write_model(kind, tmp_path))
    check_routing(TrainConfig(), config)
    with pytest.raises(ValueError, match=message):
        check_routing(TrainConfig(**options), config)
