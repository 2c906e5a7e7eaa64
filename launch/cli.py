"""Adds the commands that submit runs and watch their jobs to `mcore-rl`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rl.config import Config

LoadSettings = Callable[[Sequence[str], str], Config]
"""(recipe=<name> and overrides, command) -> the recipe as the command runs it."""


def add_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", load_settings: LoadSettings
) -> None:
    """Add submit, status, logs and cancel.

    `load_settings` reads recipe=<name> and overrides for a command.
    """
    text = (
        "submit a recipe as a job: to SLURM, KubeRay or SkyPilot, or to this machine's background"
    )
    submit = commands.add_parser("submit", help=text, description=text)
    submit.add_argument(
        "words",
        nargs="+",
        metavar="command or key=value",
        help="train (the default) or another command, recipe=<name>, launch=<name> and overrides",
    )
    submit.add_argument(
        "--dry-run", action="store_true", help="write what would be submitted, and nothing else"
    )
    submit.set_defaults(run=_submit, load_settings=load_settings)
    for name, run, text in (
        ("status", _status, "show how far a submitted run is"),
        ("logs", _logs, "print the output of a submitted run"),
        ("cancel", _cancel, "end a submitted run"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_dir", type=Path, help="the run's folder")
        command.set_defaults(run=run)
        if name == "logs":
            command.add_argument(
                "-f", "--follow", action="store_true", help="go on until the run ends"
            )


def _submit(args: argparse.Namespace) -> None:
    from launch.submit import submit

    submit(args.words, args.load_settings, args.dry_run)


def _status(args: argparse.Namespace) -> None:
    from launch.submit import show_status

    show_status(args.run_dir)


def _logs(args: argparse.Namespace) -> None:
    from launch.submit import show_logs

    show_logs(args.run_dir, args.follow)


def _cancel(args: argparse.Namespace) -> None:
    from launch.submit import cancel

    cancel(args.run_dir)
