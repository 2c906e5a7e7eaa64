"""Reads a command's recipe and overrides, and downloads inputs from the Hugging Face hub.

For a debugger, it extends the deadlines of the recipe to a week.
"""

import argparse
from collections.abc import Iterable, Sequence

from mcore_rl.config import Config
from mcore_rl.config.recipe import leaves_of, list_recipes, load_recipe
from mcore_rl.config.tree import Settings

LONG_S = 7 * 24 * 3600.0
"""Replaces each deadline that a stopped process would miss or make other processes miss."""


def take_settings(command: argparse.ArgumentParser) -> None:
    """Add recipe=<name> and overrides to a command."""
    text = "recipe=<name> and overrides"
    command.add_argument("settings", nargs="*", metavar="key=value", help=text)


def load_settings(settings: Sequence[str], command: str) -> Config:
    """Return the configuration for `command`; download its inputs from the Hugging Face hub."""
    return with_inputs(*read_recipe(settings), command)


def read_recipe(settings: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the recipe with its overrides, and the overrides themselves."""
    recipes = [s.removeprefix("recipe=") for s in settings if s.startswith("recipe=")]
    if len(recipes) != 1:
        for setting in settings:
            if setting in list_recipes():
                raise ValueError(f"{setting}: recipes are named by recipe={setting}")
        raise ValueError(
            f"give one recipe=<name>, got {len(recipes)}; recipes: {', '.join(list_recipes())}"
        )
    overrides = [s for s in settings if not s.startswith("recipe=")]
    return load_recipe(recipes[0], overrides), overrides


def with_inputs(config: Config, overrides: Sequence[str], command: str) -> Config:
    """Return the recipe, or its rehearsal, with local paths for what `command` reads.

    Raises ValueError naming cluster.gpus if the command takes more.
    """
    if command == "submit" and not config.rehearse:
        return config  # The nodes of the job download the inputs.
    from mcore_rl.planning.bundles import COMMANDS, RunSize
    from mcore_rl.planning.gpus import check_budget
    from mcore_rl.run.hub import fetch_inputs

    if config.rehearse:
        from mcore_rl.run.rehearsal import rehearse

        config = rehearse(fetch_inputs(config, "plan"), leaves_of(overrides))
    if command == "submit":
        return config
    if command in COMMANDS:
        check_budget(RunSize.make(config, command), config.cluster.gpus, config.parallel.dp)
    return fetch_inputs(config, command)


def make_debug_settings(served: Iterable[str]) -> Settings:
    """Return options for deadlines of a week, and for the reward function in the collectors.

    Ray does not know the worker processes of reward.workers, so no debugger would find them.

    served   roles of the models that the recipe serves; unread options would be refused
    """
    options = ["run.call_timeout_s", "run.startup_timeout_s", "rollout.request_timeout_s"]
    options.append("reward.timeout_s")
    options += [f"{role}.request_timeout_s" for role in served]
    return {**dict.fromkeys(options, LONG_S), "reward.workers": 0}
