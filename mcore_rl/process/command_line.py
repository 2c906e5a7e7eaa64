"""Parses command lines whose settings may stand between options."""

import argparse
from collections.abc import Sequence


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a command line; append words key=value behind later options to `settings`, in order.

    argparse alone refuses such words: it ends a list of positional arguments at the next option,
    and cannot mix positional arguments and options in a parser with subcommands.
    """
    args, left = parser.parse_known_args(argv)
    settings = getattr(args, "settings", None)
    unknown = [word for word in left if settings is None or word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if left:
        args.settings = [*(settings or ()), *left]
    return args
