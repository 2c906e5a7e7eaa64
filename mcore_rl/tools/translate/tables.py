"""Reads tables of options: those of another name, without counterpart, without need."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.tools.translate.foreign import Decision, ForeignOptions, Found, RecipeLine


def renamed(options: ForeignOptions, table: Mapping[str, tuple[str, Any]]) -> Found:
    """Yield options that have another name in a recipe, and the same meaning.

    table   their name -> (name in a recipe, their default); a default of None: left out is left out
    """
    for theirs, (ours, default) in table.items():
        value = options.take(theirs, default)
        if value is not None:
            yield RecipeLine(ours, value, (theirs,))


def switched(options: ForeignOptions, switch: str, theirs: str, ours: str, default: Any) -> Found:
    """Yield the option `theirs` under its name in a recipe, `ours`, if `switch` is on."""
    if options.take(switch, False):
        yield RecipeLine(ours, options.take(theirs, default), (theirs, switch))


def differing(options: ForeignOptions, table: Mapping[str, tuple[Any, str]]) -> Found:
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
