"""Arguments of the commands that run a recipe: sft, dpo, pairs, train and eval."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.log_files import keep_output_lasting
from mcore_rl.process.signals import watch_for_stop_requests
from mcore_rl.run.settings import read_recipe, take_settings, with_inputs

Forks = Callable[[], AbstractContextManager[None]]
"""Within its block, processes of one kind are forked from a process that has their imports."""


@dataclass(frozen=True)
class ForkServers:
    """Starts the two processes from which a run on one machine without CUDA forks its others."""

    workers: Forks
    engines: Forks


def add_arguments(
    command: argparse.ArgumentParser, name: str, forks: ForkServers, *, has_engines: bool
) -> None:
    """Add recipe and overrides to the command `name`; `has_engines`: the command starts SGLang."""
    take_settings(command)
    run = partial(_run_recipe, command=name, forks=forks, has_engines=has_engines)
    command.set_defaults(run=run, command=name)


def _run_recipe(
    args: argparse.Namespace, command: str, forks: ForkServers, has_engines: bool
) -> None:
    keep_output_lasting()
    watch_for_stop_requests()
    recipe, overrides = read_recipe(args.settings)
    with ExitStack() as open_forks:
        if recipe.cluster.address is None:
            open_forks.enter_context(forks.workers())
            if has_engines:
                open_forks.enter_context(forks.engines())
        config = with_inputs(recipe, overrides, command)
        with without_collector():  # Ray is imported here, which --help need not wait for
            from mcore_rl.run.commands import COMMANDS

        from mcore_rl.run.debugging import for_debugger

        COMMANDS[command](for_debugger(config))
