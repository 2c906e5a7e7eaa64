"""Accounts for another system's options: each is in the recipe, to decide on, or unneeded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.recipe import make_config
from mcore_rl.tools.translate.foreign import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Unneeded,
    says,
)

PASSED = frozenset({"megatron", "ddp", "sglang"})
"""Groups of options that go to Megatron and SGLang by their own names."""
AS_HERE = "it asks for what is so here anyway"
READ_BY_CHECKS = frozenset(
    {
        *("train.recompute", "rollout.attention_dp", "rollout.tp", "rollout.ep"),
        "train.megatron.moe_token_dispatcher_type",
    }
)
"""Options of a recipe on which it depends whether an option of those groups has any effect."""


@dataclass(frozen=True)
class Translation:
    """The end of the other system's options: each is in one of three lists.

    lines       options of the recipe
    decisions   options that are left to the user
    unneeded    options that a recipe does without
    """

    lines: tuple[RecipeLine, ...]
    decisions: tuple[Decision, ...]
    unneeded: tuple[Unneeded, ...]


def account(
    options: ForeignOptions, found: Found, reason_of: Callable[[str], str | None]
) -> Translation:
    """Return a translation that has every option that was given.

    found       the recipe's options and the user's decisions that follow from `options`
    reason_of   name of an option -> why a recipe does without it; None: it does not
    """
    items = list(found)
    items += _choose_correction([item for item in items if isinstance(item, RecipeLine)])
    lines = [item for item in items if isinstance(item, RecipeLine)]
    decisions = [item for item in items if isinstance(item, Decision)]
    refusals = _refusals(lines)
    decisions += [
        Decision(", ".join(line.sources), line.value, refusals[id(line)] or "")
        for line in lines
        if refusals[id(line)] is not None
    ]
    unneeded = []
    for name, value in [*options.left().items(), *options.unreadable.items()]:
        reason = reason_of(name)
        if reason is not None:
            unneeded.append(Unneeded(name, value, reason))
        elif name in options.unreadable:
            advice = "the script computes it: run the script with its functions replaced"
            decisions.append(Decision(name, value, f"{advice} (docs/switching.md)"))
        else:
            decisions.append(Decision(name, value, "this has no counterpart"))
    named = {name for item in (*lines, *decisions) for name in _sources(item)}
    unneeded += [
        Unneeded(name, value, AS_HERE)
        for name, value in options.given.items()
        if name in options.read - named and says(value)
    ]
    kept = [line for line in lines if refusals[id(line)] is None]
    return Translation(tuple(kept), tuple(decisions), tuple(unneeded))


def _choose_correction(lines: Sequence[RecipeLine]) -> list[RecipeLine | Decision]:
    """Return the choice of no correction, which a recipe has to name where samples are stale."""
    values = {line.key: line.value for line in lines}
    chosen = {"algorithm.correction.weight", "algorithm.correction.bypass"} & values.keys()
    if values.get("rollout.mode", "sync") == "sync" or chosen:
        return []
    advice = (
        "nothing there corrects for samples of older weights, so algorithm.correction.weight is"
        " none; token is the usual choice (docs/async.md)"
    )
    return [
        RecipeLine("algorithm.correction.weight", "none"),
        Decision("correction for stale samples", None, advice),
    ]


def _sources(item: RecipeLine | Decision) -> Sequence[str]:
    return item.sources if isinstance(item, RecipeLine) else item.source.split(", ")


def _refusals(lines: Sequence[RecipeLine]) -> dict[int, str | None]:
    """Return by id why a recipe refuses a line, which it does to no option of its own."""
    refusals: dict[int, str | None] = {}
    beside: list[RecipeLine] = []
    for line in lines:
        if line.key in READ_BY_CHECKS:
            refusals[id(line)] = _refusal(line, beside)
            beside += [line] if refusals[id(line)] is None else []
    for line in lines:
        if line.key not in READ_BY_CHECKS:
            refusals[id(line)] = _refusal(line, beside)
    return refusals


def _refusal(line: RecipeLine, beside: Sequence[RecipeLine]) -> str | None:
    """Return why an option of Megatron or SGLang is refused, or None."""
    if not PASSED & set(line.key.split(".")[:-1]):
        return None
    tree = OmegaConf.structured(Config)
    OmegaConf.set_struct(tree, False)
    for other in [*beside, line]:
        OmegaConf.update(tree, other.key, other.value, force_add=True)
    try:
        make_config(tree)
    except ValueError as error:
        return str(error)
    return None
