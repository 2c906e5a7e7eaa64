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
from mcore_rl.process.command_line import CommandParser, parse_arguments
from mcore_rl.run.command_arguments import (
    ForkServers,
    add_agent_arguments,
    add_engines_arguments,
    add_ledger_arguments,
    add_plan_arguments,
    add_recipe_arguments,
    add_report_arguments,
    add_serve_arguments,
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
from mcore_rl.tools.view import command as view_command

RECIPE_COMMANDS = {
    "sft": "fine-tune on the conversations in sft.data; write <run.dir>/hf",
    "dpo": "optimize preferences (DPO and relatives) on the pairs in dpo.data; write <run.dir>/hf",
    "pairs": "sample responses from model.path; write preferences among them to <run.dir>/pairs",
    "train": "train by reinforcement learning; continue from the newest checkpoint in run.dir",
    "eval": "evaluate model.path on eval.data",
}
WITH_ENGINES = ("pairs", "train", "eval")
"""Commands that start SGLang."""
FORKS = ForkServers(worker_forks, engine_forks)


def merge(checkpoint: Path, source_hf: Path, out: Path) -> object:
    """Merge a Megatron checkpoint into a HuggingFace directory; return a summary."""
    from checkpoint_tools.options import Effort
    from checkpoint_tools.to_hf import to_hf

    effort = Effort(2 << 30, min(8, os.cpu_count() or 1))
    return to_hf(checkpoint, source_hf, out, None, None, 4 << 30, effort)[0]


AddArguments = Callable[[argparse.ArgumentParser], None]
OTHER_COMMANDS: Mapping[str, tuple[str, AddArguments]] = {
    "plan": (
        "predict the memory of each rank and the traffic of a weight sync; start nothing",
        add_plan_arguments,
    ),
    "simulate": (
        "predict how long the recipe's steps take: its real controller drives simulated GPUs",
        simulate_command.add_arguments,
    ),
    "serve": (
        "serve a checkpoint by SGLang's OpenAI-compatible API until Ctrl-C",
        partial(add_serve_arguments, merge=merge),
    ),
    "report": (
        "report a run: accuracy before and after, samples, reward curve",
        add_report_arguments,
    ),
    "ledger": (
        "prove that a run's books balance: each prompt trained once, or why not",
        add_ledger_arguments,
    ),
    "engines": (
        "list the engines of a run under way, add one, or take one out",
        add_engines_arguments,
    ),
    "view": ("show runs in a browser, while they run or later", view_command.add_arguments),
    "data": ("prepare prompts: those of a toy task, or published ones", prepare.add_arguments),
    "doctor": (
        "check this machine, or several, for a run; --gpu: test its GPU",
        doctor_command.add_arguments,
    ),
    "options": ("list all options, or search them by words", options_command.add_arguments),
    "search": ("index a corpus, and search it for agents", search_command.add_arguments),
    "agent": ("run episodes of an environment", add_agent_arguments),
    "sandbox": ("run untrusted code for clients", sandbox_command.add_arguments),
    "translate": (
        "convert verl, slime or NeMo-RL options into a recipe",
        translate_command.add_arguments,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status, see run.process_setup.run_command.

    Only without `argv`, as the program itself, a training command goes on in a child process.
    """
    parser = make_parser()
    answer_shell(parser)
    args = parse_arguments(parser, argv)
    args.is_program = argv is None
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
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        required=True, metavar="command", parser_class=CommandParser
    )
    for name, text in RECIPE_COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=_show_example(name))
        add_recipe_arguments(command, name, FORKS, has_engines=name in WITH_ENGINES)
    launch.cli.add_commands(commands, load_settings)
    for name, (text, add_arguments) in OTHER_COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=text))
    return parser


def _show_example(command: str) -> str:
    return (
        "key=value sets an option of the recipe, ~key gives it its default back;\n"
        "`mcore-rl options WORD` finds options, `mcore-rl --help` lists the recipes.\n\n"
        f"example: mcore-rl {command} recipe=tiny_moe_grpo run.dir=runs/mine"
    )


def _list_recipes() -> str:
    """Return a line for each recipe: its name and its headline."""
    headlines = list_recipes()
    width = max(map(len, headlines))
    return "\n".join(f"  {name:{width}}  {line}" for name, line in headlines.items())


if __name__ == "__main__":
    sys.exit(main())
