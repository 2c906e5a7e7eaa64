"""Arguments of `mcore-rl simulate`; imports nothing heavy."""

import argparse
from pathlib import Path

from mcore_rl.checks.inputs import check_planned
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.run.settings import read_recipe, take_settings, with_inputs


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
    command.add_argument(
        "--effective",
        action="store_true",
        help="say how much of the time is effective, with recoveries and with restarts",
    )
    command.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> None:
    recipe, overrides = read_recipe(args.settings)
    check_planned(recipe.algorithm, recipe.model.path)
    with without_collector():
        from mcore_rl.tools.simulate.prediction import print_simulation  # imports torch

    config = with_inputs(recipe, overrides, "plan")
    print_simulation(
        *(config, args.out),
        as_json=args.json,
        search_gpus=args.search,
        is_effective=args.effective,
    )
