"""The command `mcore-rl translate`."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.translate.foreign import Unneeded


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments; nothing heavy is imported before it runs."""
    command.description = "a recipe made of another system's configuration"
    command.add_argument("system", choices=["verl"])
    command.add_argument(
        "options",
        nargs="+",
        metavar="file.yaml|key=value",
        help="verl's configuration (`--cfg job`), .hydra/overrides.yaml, overrides, or after `--`"
        " a whole command line",
    )
    command.add_argument("--out", type=Path, help="file of the recipe; default: standard output")
    command.set_defaults(run=run_translate)


def run_translate(args: argparse.Namespace) -> None:
    """Write the recipe, and tell what it does not have. Raises ValueError for wrong input."""
    from mcore_rl.translate.foreign import read_options
    from mcore_rl.translate.verl import translate_verl
    from mcore_rl.translate.written import write_recipe

    if args.out is not None and args.out.exists():
        raise ValueError(f"--out {args.out}: the file exists; delete it, or name another")
    options = read_options(args.options)
    translation = translate_verl(options)
    title = f"made of verl's options by `mcore-rl translate verl`: {len(options.given)} given"
    text = write_recipe(translation, title)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
    _tell(translation.unneeded, options.is_whole)
    print(
        f"{len(translation.lines)} options, {len(translation.decisions)} to decide on (at the top),"
        f" {len(translation.unneeded)} unneeded",
        file=sys.stderr,
    )


def _tell(unneeded: Sequence[Unneeded], is_whole: bool) -> None:
    if is_whole:
        for reason, number in Counter(item.reason for item in unneeded).most_common():
            print(f"unneeded: {number} options: {reason}", file=sys.stderr)
        return
    for item in unneeded:
        print(f"unneeded: {item.source}={item.value}: {item.reason}", file=sys.stderr)
