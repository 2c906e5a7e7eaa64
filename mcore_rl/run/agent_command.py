"""Arguments of `mcore-rl agent`; imports nothing heavy."""

import argparse
from collections.abc import Callable, Sequence

from mcore_rl.config import Config
from mcore_rl.process.gc_pause import without_collector


def add_arguments(
    command: argparse.ArgumentParser, load_settings: Callable[[Sequence[str], str], Config]
) -> None:
    """Add the subcommand `run`."""
    kinds = command.add_subparsers(required=True, metavar="kind")
    text = "run episodes of a recipe with model.path, and print the conversations"
    run = kinds.add_parser("run", help=text, description=text)
    run.add_argument("settings", nargs="*", metavar="key=value", help="recipe=<name> and overrides")
    run.add_argument("--episodes", type=int, default=2, help="one for each of the first prompts")
    run.add_argument("--greedy", action="store_true", help="take the most likely tokens")

    def run_episodes(args: argparse.Namespace) -> None:
        if args.episodes < 1:
            raise ValueError(f"--episodes {args.episodes}: at least 1")
        config = load_settings(args.settings, "train")
        with without_collector():
            from mcore_rl.run.agent import run_agent

        run_agent(config, args.episodes, greedy=args.greedy)

    run.set_defaults(run=run_episodes)
