"""Parses command lines whose settings may stand between options; shows help on one screen."""

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

HELP_WIDTH = 78
"""Columns of a command's description; its epilog is shown as it is written."""
MOST_SHOWN = 6
"""Options that a line of usage names one by one."""


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Keeps the help of a command on one screen: a short usage, options and texts on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Add the line of usage; beyond MOST_SHOWN options it has [options] in their place."""
        actions = list(actions)
        options = [action for action in actions if action.option_strings]
        if usage is None and len(options) > MOST_SHOWN:
            names = [(a.metavar or a.dest, a.nargs) for a in actions if not a.option_strings]
            words = (f"[{name} ...]" if nargs == "*" else str(name) for name, nargs in names)
            usage = f"{self._prog} [options] {' '.join(words)}"
        super().add_usage(usage, actions, groups, prefix)


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of a command, and shows them by ShortHelp."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        wrapped = textwrap.fill(description or "", HELP_WIDTH)
        super().__init__(description=wrapped, formatter_class=ShortHelp, **options)


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a command line; append settings (key=value, ~key) behind later options to `settings`.

    argparse alone refuses such words: it ends a list of positional arguments at the next option,
    and cannot mix positional arguments and options in a parser with subcommands.
    """
    args, left = parser.parse_known_args(argv)
    settings = getattr(args, "settings", None)
    unknown = [word for word in left if settings is None or not _is_setting(word)]
    if unknown:
        hint = "" if settings is None else _name_settings(unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if left:
        args.settings = [*(settings or ()), *left]
    return args


def _name_settings(words: Sequence[str]) -> str:
    """Return a hint for options of a recipe that are spelled as those of a command."""
    names = [word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")]
    if not names:
        return ""
    return f"; options of a recipe have the form key=value: {names[0].replace('-', '_')}=<value>"


def _is_setting(word: str) -> bool:
    """Return whether a word is key=value, or ~key, which takes an option of a recipe out."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))
