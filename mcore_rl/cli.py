"""Runs the mcore-rl command: a table of its commands, each of which declares its own arguments."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import launch.cli
from mcore_rl import __version__
from mcore_rl.config.recipe import list_recipes
from mcore_rl.cpu.engine_forks import engine_forks
from mcore_rl.cpu.worker_forks import worker_forks
from mcore_rl.process.command_line import parse_arguments
from mcore_rl.run import (
    agent_command,
    plan_command,
    recipe_command,
    report_command,
    serve_command,
)
from mcore_rl.run.process_setup import run_command
from mcore_rl.run.settings import load_settings
from mcore_rl.services.sandbox import command as sandbox_command
from mcore_rl.services.search import command as search_command
from mcore_rl.tasks import prepare
from mcore_rl.tools import options as options_command
from mcore_rl.tools.completion import answer_shell
from mcore_rl.tools.doctor import command as doctor_command
from mcore_rl.tools.simulate import command as simulate_command
from mcore_rl.tools.translate import command as translate_command

RECIPE_COMMANDS = {
    "sft": "supervised fine-tuning on sft.data; writes <run.dir>/hf",
    "dpo": "preference optimization (DPO and relatives) on dpo.data; writes <run.dir>/hf",
    "pairs": "preference data from model.path's own responses, for dpo; writes <run.dir>/pairs",
    "train": "reinforcement learning; continues from the newest checkpoint in run.dir",
    "eval": "accuracy of model.path on eval.data",
}
WITH_ENGINES = ("pairs", "train", "eval")
"""Commands that start SGLang."""
FORKS = recipe_command.ForkServers(worker_forks, engine_forks)


def merge(checkpoint: Path, source_hf: Path, out: Path) -> object:
    """Merge a Megatron checkpoint into a HuggingFace directory; return what to tell of it."""
    from checkpoint_tools.options import Effort
    from checkpoint_tools.to_hf import to_hf

    effort = Effort(2 << 30, min(8, os.cpu_count() or 1))
    return to_hf(checkpoint, source_hf, out, None, None, 4 << 30, effort)[0]


AddArguments = Callable[[argparse.ArgumentParser], None]
OTHER_COMMANDS: Mapping[str, tuple[str, AddArguments]] = {
    "plan": (
        "memory of every rank and traffic of a weight sync, from config.json; starts nothing",
        plan_command.add_arguments,
    ),
    "simulate": (
        "the recipe's steps in predicted time, with its real controller and simulated GPUs;"
        " from config.json alone",
        simulate_command.add_arguments,
    ),
    "serve": (
        "a checkpoint behind SGLang's OpenAI-compatible API, until Ctrl-C",
        partial(serve_command.add_arguments, merge=merge),
    ),
    "report": (
        "accuracy before and after, samples, reward curve of a run",
        report_command.add_arguments,
    ),
    "data": ("prepare prompts: made here, or gsm8k", prepare.add_arguments),
    "doctor": (
        "check this machine, or several, for a run; --gpu: try out its GPU",
        doctor_command.add_arguments,
    ),
    "options": ("all options, or those with a word", options_command.add_arguments),
    "search": ("passages for agents, by an index", search_command.add_arguments),
    "agent": (
        "try an environment",
        partial(agent_command.add_arguments, load_settings=load_settings),
    ),
    "sandbox": ("run untrusted code for others", sandbox_command.add_arguments),
    "translate": (
        "convert verl, slime or NeMo-RL options into a recipe",
        translate_command.add_arguments,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status, see run.process_setup.run_command."""
    parser = make_parser()
    answer_shell(parser)
    args = parse_arguments(parser, argv)
    return run_command(partial(args.run, args))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; nothing heavy is imported for it."""
    parser = argparse.ArgumentParser(
        prog="mcore-rl",
        description="Reinforcement-learning post-training of mixture-of-experts models.",
        epilog=f"recipes:\n{_list_recipes()}\n\n"
        "example: mcore-rl train recipe=tiny_moe_grpo run.steps=10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in RECIPE_COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        recipe_command.add_arguments(command, name, FORKS, has_engines=name in WITH_ENGINES)
    launch.cli.add_commands(commands, load_settings)
    for name, (text, add_arguments) in OTHER_COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=text))
    return parser


def _list_recipes() -> str:
    """Return a line for each recipe: its name and its headline."""
    headlines = list_recipes()
    width = max(map(len, headlines))
    return "\n".join(f"  {name:{width}}  {line}" for name, line in headlines.items())


if __name__ == "__main__":
    sys.exit(main())
