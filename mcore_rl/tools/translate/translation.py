"""Accounts for another system's options: each is in the recipe, to decide on, or unneeded.

Another system's options by dotted name, and what a translation of them consists of.

Reads tables of options: those of another name, without counterpart, without need.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.recipe import make_config

V = TypeVar("V")


@dataclass(frozen=True)
class RecipeLine:
    """An option of the recipe, and the options that it was made of."""

    key: str
    value: Any
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """An option that is the user's to decide on: it has no counterpart, or more than one."""

    source: str
    value: Any
    advice: str


@dataclass(frozen=True)
class Unneeded:
    """An option that a recipe does without."""

    source: str
    value: Any
    reason: str


Found = Iterator[RecipeLine | Decision]


def says(value: Any) -> bool:
    """Return whether an option's value is more than that of one that is left out."""
    return value not in (None, False, "", [], {})


@dataclass
class ForeignOptions:
    """Options by name; those that are read are remembered.

    given         the options that the input has
    is_whole      whether the input is a whole configuration, whose defaults nobody chose
    config_name   of the configuration whose defaults hold for what is not given, or of the program
                  that takes the options; empty: unknown
    unreadable    options whose value the input computes, and the text that computes it
    """

    given: Mapping[str, Any]
    is_whole: bool
    config_name: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def take(self, name: str, default: V) -> V:
        """Return an option, or what the other system takes if it is left out or null."""
        self.read.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def take_list(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return an option that is a list of texts, or a single one."""
        value: Any = self.take(name, default)
        return [value] if isinstance(value, str) else list(value)

    def below(self, prefix: str, but: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the options whose names begin with `prefix`, without it, except nulls.

        Names that go on with one of `but` are neither returned nor read.
        """
        begins = tuple(f"{prefix}{name}" for name in but)
        names = [n for n in self.given if n.startswith(prefix) and not n.startswith(begins)]
        self.read.update(names)
        return {
            name.removeprefix(prefix): self.given[name]
            for name in names
            if self.given[name] is not None
        }

    def list_left(self) -> dict[str, Any]:
        """Return the options that nobody has read, except those that say nothing."""
        return {
            name: value
            for name, value in self.given.items()
            if name not in self.read and says(value)
        }


def translate_renamed(options: ForeignOptions, table: Mapping[str, tuple[str, Any]]) -> Found:
    """Yield options that have another name in a recipe, and the same meaning.

    table   their name -> (name in a recipe, their default); a default of None: left out is left out
    """
    for theirs, (ours, default) in table.items():
        value = options.take(theirs, default)
        if value is not None:
            yield RecipeLine(ours, value, (theirs,))


def translate_switched(
    options: ForeignOptions, switch: str, theirs: str, ours: str, default: Any
) -> Found:
    """Yield the option `theirs` under its name in a recipe, `ours`, if `switch` is on."""
    if options.take(switch, False):
        yield RecipeLine(ours, options.take(theirs, default), (theirs, switch))


def list_differing(options: ForeignOptions, table: Mapping[str, tuple[Any, str]]) -> Found:
    """Yield what is left to the user: options that have no counterpart, unless they say nothing.

    table   their name -> (their default, advice)
    """
    for theirs, (default, advice) in table.items():
        value = options.take(theirs, default)
        if value != default:
            yield Decision(theirs, value, advice)


def longest_prefix(table: Mapping[str, str], name: str) -> str | None:
    """Return the entry of the longest key with which the name begins, or None."""
    matching = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(matching, key=len)] if matching else None


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
    for name, value in [*options.list_left().items(), *options.unreadable.items()]:
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
