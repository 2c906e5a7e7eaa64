"""Arguments of `mcore-rl report`; imports nothing heavy."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the folder of a run."""
    command.add_argument("run_dir", type=Path)
    command.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from mcore_rl.logs.run_report import make_report

    make_report(args.run_dir)
