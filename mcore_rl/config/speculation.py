"""Checks of options of engines that speculate: what contradicts them, and what is unread."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.rollout import DriftConfig, RolloutConfig
from mcore_rl.config.training import TrainConfig
from mcore_rl.config.tree import spell
from mcore_rl.config.tree_checks import Unread


def find_unread_in_speculation(rollout: RolloutConfig) -> Iterator[Unread]:
    """Yield the options that nothing reads while engines do not speculate."""
    if rollout.speculate == "none":
        options = ("rollout.speculate_tokens", "rollout.speculate_when")
        yield Unread(options, "rollout.speculate=none", "set rollout.speculate=ngram or mtp")


def check_speculation(rollout: RolloutConfig, drift: DriftConfig, train: TrainConfig) -> None:
    """Raise ValueError naming the first option that engines which speculate cannot have."""
    if rollout.speculate == "none":
        _refuse_unread(rollout)
        return
    if rollout.speculate == "mtp" and not train.mtp_loss:
        raise ValueError(
            "rollout.speculate=mtp with train.mtp_loss=0.0: the layer would stay as it began while"
            " the policy learns; set train.mtp_loss=0.3, or rollout.speculate=ngram or none"
        )
    conflicts: dict[str, tuple[Any, Any, str]] = {
        "rollout.attention_dp": (
            rollout.attention_dp,
            1,
            "what SGLang draws with DP attention is not known to be right, and n-grams need none",
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
    if train.lora.rank:
        conflicts["train.lora.sync"] = (
            train.lora.sync,
            "merged" if train.lora.sync == "adapter" else train.lora.sync,
            "what SGLang draws with adapters is not known to be right",
        )
    if rollout.speculate == "mtp":
        conflicts["rollout.quantization"] = (
            rollout.quantization,
            "none",
            "how engines quantize the layer that guesses is not known",
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
                " it; set rollout.speculate=ngram or mtp, or leave it out"
            )
