"""`mcore-rl translate`: converts verl, slime or NeMo-RL options into a recipe."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.process.disk import write_whole
from mcore_rl.tools.translate.translation import Unneeded

NAMES = ("verl", "slime", "nemo-rl")
"""The systems; systems.py has how they are read, and is imported by need."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments; nothing heavy is imported before it runs."""
    command.description = "convert verl, slime or NeMo-RL options into a recipe"
    command.add_argument("system", choices=NAMES)
    command.add_argument(
        "options",
        nargs="+",
        metavar="file|option",
        help="verl: its configuration (`--cfg job`), .hydra/overrides.yaml, overrides key=value;"
        " slime: scripts (.sh), and after `--` options; nemo-rl: a configuration (.yaml), overrides"
        " key=value; each: after `--` a whole command line",
    )
    command.add_argument("--out", type=Path, help="file of the recipe; default: standard output")
    command.set_defaults(run=run_translate)


def run_translate(args: argparse.Namespace) -> None:
    """Write the recipe, and list the unneeded options. Raises ValueError for wrong input."""
    from mcore_rl.tools.translate.systems import SYSTEMS, complete, write_recipe

    if args.out is not None and args.out.exists():
        raise ValueError(f"--out {args.out}: the file exists; delete it, or name another")
    system = SYSTEMS[args.system]
    options = system.read(args.options)
    translation = complete(system.translate(options))
    given = len(options.given) + len(options.unreadable)
    title = f"made of {system.title}'s options by `mcore-rl translate {args.system}`: {given} given"
    if translation.command != "train":
        title += f"; for `mcore-rl {translation.command}`"
    text = write_recipe(translation, title)
    if args.out is None:
        print(text, end="")
    else:
        write_whole(args.out, text)
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
