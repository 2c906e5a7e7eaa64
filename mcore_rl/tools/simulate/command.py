"""Arguments of `mcore-rl simulate`; imports nothing heavy."""

import argparse
from pathlib import Path

from mcore_rl.process.gc_pause import without_collector
from mcore_rl.run.settings import load_settings, take_settings


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its settings and the options of its output."""
    take_settings(command)
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    command.add_argument(
        "--out", type=Path, help="folder for picture, trace and numbers (<run.dir>/simulation)"
    )
    command.add_argument(
        "--search",
        type=int,
        nargs="?",
        const=0,
        metavar="GPUS",
        help="compare splits of so many GPUs (the recipe's) between trainer and engines",
    )
    command.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    with without_collector():
        from mcore_rl.tools.simulate.prediction import print_simulation  # imports torch

    config = load_settings(args.settings, "plan")
    print_simulation(config, args.out, as_json=args.json, search_gpus=args.search)
