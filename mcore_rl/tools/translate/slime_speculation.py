"""Converts how engines guess tokens, which slime says with SGLang's options, and what trains them.

Layers for multi-token prediction (MTP) are trained apart from the policy there as here.
"""

from collections.abc import Mapping

from mcore_rl.tools.translate.slime_training import ENGINE_SIZES, first_given
from mcore_rl.tools.translate.translation import Decision, ForeignOptions, Found, RecipeLine

ALGORITHM = "--sglang-speculative-algorithm"
STEPS = "--sglang-speculative-num-steps"
BRANCHES = "--sglang-speculative-eagle-topk"
DRAFTS = "--sglang-speculative-num-draft-tokens"
TRAINING = "--enable-mtp-training"
BY_LAYER = ("EAGLE", "NEXTN")
"""SGLang's names for drafts of a layer that the served model itself has."""
NGRAM_DRAFTS = 12
"""SGLang's own number of drafts by n-grams, with the token that they follow."""


def translate_mtp_loss(options: ForeignOptions) -> Found:
    """Yield the weight of the loss of the layers for multi-token prediction."""
    if options.take(TRAINING, False):
        weight = "--mtp-loss-scaling-factor"
        yield RecipeLine("train.mtp_loss", options.take(weight, 0.1), (TRAINING, weight))
        advice = "models for which docs/mtp.md has no such layers: leave train.mtp_loss out"
        yield Decision(TRAINING, True, advice)


def translate_speculation(options: ForeignOptions) -> Found:
    """Yield what engines guess tokens with."""
    kind = options.take(ALGORITHM, "")
    if not kind:
        return
    is_layer = kind in BY_LAYER
    asked = {name: options.take(name, None) for name in (STEPS, BRANCHES, DRAFTS)}
    names = (ALGORITHM, *(name for name, value in asked.items() if value is not None))
    obstacle = _find_obstacle(options, kind) or (_find_tree(asked) if is_layer else None)
    if obstacle is not None:
        yield Decision(", ".join(names), kind, f"{obstacle} (docs/speculation.md)")
        return
    yield RecipeLine("rollout.speculate", "mtp" if is_layer else "ngram", (ALGORITHM,))
    # With one branch SGLang has a draft for each step, whatever it is told.
    number = asked[STEPS] if is_layer else (asked[DRAFTS] or NGRAM_DRAFTS) - 1
    yield RecipeLine("rollout.speculate_tokens", number, names)
    if not is_layer:
        # SGLang does not report the right experts of tokens that n-grams guessed.
        yield RecipeLine("drift.routed_experts", False, (ALGORITHM,))


def _find_obstacle(options: ForeignOptions, kind: str) -> str | None:
    """Return why the engines of a recipe do not guess as they are told to, or None."""
    if kind not in (*BY_LAYER, "NGRAM"):
        return "rollout.speculate is ngram, or mtp for a layer of the model itself"
    for ours in ("attention_dp", "pp"):
        name, size = first_given(options, ENGINE_SIZES[ours], 1)
        if size > 1:
            return f"engines do not guess with {name}: set rollout.{ours}=1 and rollout.speculate"
    if kind == "NGRAM":
        has_replay = options.take("--use-rollout-routing-replay", False)
        advice = "experts of tokens that n-grams guessed cannot be replayed: set rollout.speculate"
        return f"{advice} and train.router_replay=none" if has_replay else None
    if "fp8" in str(options.take("--hf-checkpoint", "")).lower():
        return "the layer that guesses is not served in FP8: set rollout.quantization=none"
    if options.take(TRAINING, False):
        return None
    return (
        "the layer stays there as it was loaded, and learns along here: set rollout.speculate=mtp"
        " and train.mtp_loss, or rollout.speculate=ngram"
    )


def _find_tree(asked: Mapping[str, int | None]) -> str | None:
    """Return why the guesses of a layer are not one behind the other, or None."""
    if asked[BRANCHES] == 1 and asked[STEPS] is not None:
        return None
    return (
        "a guess follows the one before here: set rollout.speculate=mtp, rollout.speculate_tokens"
    )
