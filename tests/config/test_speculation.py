"""Options of engines that speculate: what contradicts them."""

from typing import Any

import pytest

from mcore_rl.config.rollout import DriftConfig, RolloutConfig
from mcore_rl.config.speculation import check_speculation
from mcore_rl.config.training import LoraConfig

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
    groups = DriftConfig(**drift), LoraConfig(**lora)
    check_speculation(RolloutConfig(**rollout), *groups)
    with pytest.raises(ValueError, match=f"^rollout.speculate=ngram with .*{message}"):
        check_speculation(RolloutConfig(**NGRAM, **rollout), *groups)


def test_engines_that_speculate_may_have_the_rest() -> None:
    rollout = RolloutConfig(
        **NGRAM, tp=4, mode="async", sglang={"speculative_ngram_max_bfs_breadth": 1}
    )
    check_speculation(rollout, DriftConfig(), LoraConfig(rank=8, sync="factors"))
