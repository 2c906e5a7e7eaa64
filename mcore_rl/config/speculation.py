"""Checks of options of engines that speculate: what contradicts them, and what is unread."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.rollout import DriftConfig, RolloutConfig
from mcore_rl.config.training import LoraConfig
from mcore_rl.config.tree import spell
from mcore_rl.config.tree_checks import Unread


def find_unread_in_speculation(rollout: RolloutConfig) -> Iterator[Unread]:
    """Yield the options that nothing reads while engines do not speculate."""
    if rollout.speculate == "none":
        options = ("rollout.speculate_tokens",)
        yield Unread(options, "rollout.speculate=none", "set rollout.speculate=ngram")


def check_speculation(rollout: RolloutConfig, drift: DriftConfig, lora: LoraConfig) -> None:
    """Raise ValueError naming the first option that engines which speculate cannot have."""
    if rollout.speculate == "none":
        _refuse_unread(rollout)
        return
    conflicts: dict[str, tuple[Any, Any, str]] = {
        "rollout.attention_dp": (
            rollout.attention_dp,
            1,
            "SGLang guesses with n-grams only without DP attention",
        ),
        "rollout.pp": (
            rollout.pp,
            1,
            "what SGLang draws over several pipeline stages is not known to be right",
        ),
        "rollout.deterministic": (
            rollout.deterministic,
            False,
            "guesses depend on what else the engine has decoded",
        ),
        "drift.indexer_topk": (
            drift.indexer_topk,
            False,
            "what SGLang reports of tokens that were guessed is not known to be right",
        ),
    }
    if lora.rank:
        conflicts["train.lora.sync"] = (
            lora.sync,
            "merged" if lora.sync == "adapter" else lora.sync,
            "what SGLang draws with adapters is not known to be right",
        )
    for name, (value, needed, why) in conflicts.items():
        if value != needed:
            raise ValueError(
                f"rollout.speculate={rollout.speculate} with {name}={spell(value)}: {why}; set"
                f" {name}={spell(needed)} or rollout.speculate=none"
            )


def _refuse_unread(rollout: RolloutConfig) -> None:
    for name, value in rollout.sglang.items():
        if name.startswith("speculative_") and value is not None:
            raise ValueError(
                f"rollout.sglang.{name}={spell(value)} with rollout.speculate=none: nothing reads"
                " it; set rollout.speculate=ngram or leave it out"
            )
