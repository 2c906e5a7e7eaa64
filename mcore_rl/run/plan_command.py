"""Arguments of `mcore-rl plan`; imports nothing heavy."""

import argparse

from mcore_rl.process.gc_pause import without_collector
from mcore_rl.run.settings import load_settings, take_settings


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the settings and --json."""
    take_settings(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    command.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    with without_collector():
        from mcore_rl.planning.plan import print_plan  # imports torch

    if not print_plan(load_settings(args.settings, "plan"), as_json=args.json):
        raise RuntimeError("the recipe does not fit its GPUs")
