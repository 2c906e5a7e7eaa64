"""Options of engines that speculate: what contradicts them."""

from typing import Any

import pytest

from mcore_rl.config.rollout import DriftConfig, RolloutConfig
from mcore_rl.config.speculation import check_speculation
from mcore_rl.config.training import LoraConfig, TrainConfig

NGRAM: dict[str, Any] = {"speculate": "ngram"}


@pytest.mark.parametrize(
    ("rollout", "drift", "lora", "message"),
    [
        ({"tp": 4, "attention_dp": 4}, {}, {}, "rollout.attention_dp=4: .*set .*=1 or"),
        ({"pp": 2}, {}, {}, "rollout.pp=2: .* set rollout.pp=1 or rollout.speculate=none"),
        ({"deterministic": True}, {}, {}, "set rollout.deterministic=false or"),
        ({}, {"indexer_topk": True}, {}, "set drift.indexer_topk=false or"),
        ({}, {}, {"rank": 8, "sync": "adapter"}, "set train.lora.sync=merged or"),
    ],
)
def test_what_engines_that_speculate_cannot_have_is_named(
    rollout: dict[str, Any], drift: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    groups = DriftConfig(**drift), TrainConfig(lora=LoraConfig(**lora))
    check_speculation(RolloutConfig(**rollout), *groups)
    with pytest.raises(ValueError, match=f"^rollout.speculate=ngram with .*{message}"):
        check_speculation(RolloutConfig(**NGRAM, **rollout), *groups)


def test_engines_that_speculate_may_have_the_rest() -> None:
    rollout = RolloutConfig(
        **NGRAM, tp=4, mode="async", sglang={"speculative_ngram_max_bfs_breadth": 1}
    )
    lora = LoraConfig(rank=8, sync="factors")
    check_speculation(rollout, DriftConfig(), TrainConfig(lora=lora))
    drafting = TrainConfig(mtp_loss=0.3)
    check_speculation(RolloutConfig(speculate="mtp", tp=2), DriftConfig(), drafting)


def test_layers_that_guess_must_learn() -> None:
    with pytest.raises(ValueError, match=r"^rollout.speculate=mtp with train.mtp_loss=0.0"):
        check_speculation(RolloutConfig(speculate="mtp"), DriftConfig(), TrainConfig())
    rollout = RolloutConfig(speculate="mtp", quantization="fp8")
    with pytest.raises(ValueError, match=r"with rollout.quantization=fp8: .*=none or"):
        check_speculation(rollout, DriftConfig(), TrainConfig(mtp_loss=0.3))
