"""Completes commands, recipes, options and their values in a shell, by argcomplete.

    eval "$(register-python-argcomplete mcore-rl)"       once for each shell, bash or zsh
    mcore-rl train recipe=tiny_m<TAB> rollout.mode=<TAB>

A shell that asks for completions runs the command with _ARGCOMPLETE set; only then argcomplete is
imported.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from mcore_rl.config import Config
from mcore_rl.config.bounds import Choices, is_group, options_of
from mcore_rl.config.recipe import list_recipes
from mcore_rl.config.tree import leaves_under, spell


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Print completions and end the process if a shell asks for them; otherwise do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    for action in _list_actions(parser):
        if action.dest == "settings":
            action.completer = complete_setting  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def complete_setting(prefix: str, **_: Any) -> list[str]:
    """Return what a word key=value may become that begins with `prefix`."""
    name, has_value, _value = prefix.partition("=")
    if not has_value:
        words = [f"{name}=" for name in ("recipe", *leaves_under(Config))]
    elif name == "recipe":
        words = [f"recipe={recipe}" for recipe in list_recipes()]
    else:
        words = [f"{name}={value}" for value in _list_values(Config, name)]
    return [word for word in words if word.startswith(prefix)]


def _list_values(cls: type, name: str) -> list[str]:
    """Return the values of an option that has few of them."""
    first, _, rest = name.partition(".")
    kind, bounds = options_of(cls).get(first, (None, None))
    if rest:
        return _list_values(kind, rest) if isinstance(kind, type) and is_group(kind) else []
    if isinstance(bounds, Choices):
        return [spell(value) for value in bounds.values]
    return ["true", "false"] if kind is bool else []


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)
