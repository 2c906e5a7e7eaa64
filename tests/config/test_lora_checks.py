"""Options that contradict low-rank factors, or have no effect beside them, are refused by name."""

from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings

ON = {"train.lora.rank": 8}
CRITIC = {"critic.lora.rank": 8}
SERVED = ON | {"train.lora.sync": "adapter"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.lora.alpha": 8.0}, "train.lora.alpha=8.0 with train.lora.rank=0"),
        ({"train.lora.experts": False}, "train.lora.experts=false with train.lora.rank=0"),
        (ON | {"train.freeze_router": True}, "train.freeze_router=true with train.lora.rank=8"),
        (ON | {"train.vision": "none"}, "train.vision=none with train.lora.rank=8"),
        (ON | {"train.router_bias_rate": 0.1}, "train.router_bias_rate=0.1 with train.lora.rank=8"),
        (ON | {"train.indexer_loss": 0.1}, "train.indexer_loss=0.1 with train.lora.rank=8"),
        (ON | {"train.mtp_loss": 0.1}, "train.mtp_loss=0.1 with train.lora.rank=8"),
        (ON | {"train.router_aux_loss_coef": 0.1}, "train.router_aux_loss_coef=0.1 with"),
        (
            ON | {"train.router_sequence_aux_loss_coef": 0.1},
            "train.router_sequence_aux_loss_coef=0.1 with train.lora.rank=8",
        ),
        (ON | {"sft.optimizer.vision_lr": 1e-4}, "sft.optimizer.vision_lr=0.0001 with"),
        (ON | {"train.optimizer.name": "muon"}, "train.optimizer.name=muon with train.lora.rank=8"),
        (ON | {"dpo.optimizer.name": "muon"}, "dpo.optimizer.name=muon with train.lora.rank=8"),
        ({"critic.lora.alpha": 8.0}, "critic.lora.alpha=8.0 with critic.lora.rank=0"),
        (CRITIC | {"critic.optimizer.name": "muon"}, "name=muon with critic.lora.rank=8"),
        (CRITIC | {"critic.optimizer.vision_lr": 1e-4}, "vision_lr=0.0001 with critic.lora.rank=8"),
        (
            CRITIC | {"train.megatron": {"gradient_accumulation_fusion": True}},
            "critic.megatron.gradient_accumulation_fusion=true with critic.lora.rank=8",
        ),
        (
            CRITIC | {"critic.ddp": {"overlap_grad_reduce": True}},
            "critic.ddp.overlap_grad_reduce=true with critic.lora.rank=8",
        ),
        (ON | {"train.lora.name": "a"}, "train.lora.name=a with train.lora.sync=auto"),
        (SERVED | {"train.lora.name": "base"}, "train.lora.name='base': give letters"),
        (SERVED | {"train.lora.name": "a,b"}, "train.lora.name='a,b': give letters"),
        (
            SERVED | {"train.lora.engine_base": "gpu"},
            "engine_base=gpu with train.lora.sync=adapter",
        ),
        (SERVED | {"rollout.stage_weights": False}, "rollout.stage_weights=false: engines that"),
        (SERVED | {"rollout.pp": 2}, "train.lora.sync=adapter with rollout.pp=2"),
        (
            SERVED | {"rollout.quantization": "fp8", "model.dtype": "bfloat16"},
            "train.lora.sync=adapter with rollout.quantization=fp8",
        ),
        (
            SERVED | {"rollout.tp": 2, "rollout.attention_dp": 2},
            "train.lora.sync=adapter with rollout.attention_dp=2",
        ),
        (
            ON | {"train.megatron": {"gradient_accumulation_fusion": True}},
            "train.megatron.gradient_accumulation_fusion=true with train.lora.rank=8",
        ),
        (
            ON | {"train.ddp": {"overlap_grad_reduce": True}},
            "train.ddp.overlap_grad_reduce=true with train.lora.rank=8",
        ),
    ],
)
def test_an_option_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        with_settings(Config(), settings)
    assert message in str(error.value)


def test_routers_of_a_policy_may_learn_beside_a_critics_factors() -> None:
    assert with_settings(Config(), CRITIC | {"train.router_bias_rate": 0.1}).critic.lora.rank == 8


def test_other_optimizers_and_the_critics_pass() -> None:
    further = {"train.optimizer.name": "lion", "critic.optimizer.name": "muon"}
    config = with_settings(Config(), ON | {"train.lora.alpha": 8.0, "train.lora.rslora": True})
    assert with_settings(config, further).train.lora.rank == 8
