"""Refuses a job before it waits in a queue: inputs that its nodes lack, ranks that do not fit."""

from collections.abc import Sequence
from pathlib import Path

from launch.cli import LoadSettings
from launch.mounts import find_place
from launch.options import LaunchOptions
from mcore_rl.checks.inputs import (
    HubUnreachableError,
    RunPlace,
    is_on_hub,
    list_input_checks,
    refuse_missing,
)
from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings


def check_job(
    config: Config,
    command: str,
    settings: Sequence[str],
    options: LaunchOptions,
    load_settings: LoadSettings,
) -> None:
    """Raise ValueError for the first thing that the job would end with, cheap checks first.

    Memory is planned by the config.json of model.path, or of the recipe's own model if only the
    nodes have that; what was planned, or why nothing was, is printed.
    """
    run_dir = config.run.dir if options.is_away else str(Path(config.run.dir).absolute())
    place = find_place(run_dir, options)
    place.look("run.dir", run_dir)
    refuse_missing(list_input_checks(config, command, place))
    planned = _find_planned(config, settings, place, load_settings)
    if planned is None:
        return
    from mcore_rl.planning.verdict import refuse_too_large  # imports torch

    refuse_too_large(planned, command)


def _find_planned(
    config: Config, settings: Sequence[str], place: RunPlace, load_settings: LoadSettings
) -> Config | None:
    """Return the recipe with models whose config.json is here, None if there is none."""
    path = config.model.path
    why = "only the nodes have it"
    if is_on_hub(path):
        try:
            return load_settings(settings, "plan")
        except HubUnreachableError:
            why = "the Hugging Face hub cannot be reached from here"
    elif folder := place.look("model.path", path):
        return with_settings(config, {"model.path": str(folder)} | _plan_critic(config, place))
    own = [word for word in settings if not word.startswith(("model.", "critic.path="))]
    try:
        planned = load_settings(own, "plan")
    except ValueError:
        planned = None
    if planned is None or not Path(planned.model.path, "config.json").is_file():
        print(f"memory is not checked: model.path={path}: {why}")
        return None
    print(f"memory is checked with {planned.model.path}, as model.path={path}: {why}")
    return planned


def _plan_critic(config: Config, place: RunPlace) -> dict[str, str]:
    """Return critic.path as this machine sees it; empty, as the policy, where it does not."""
    path = config.critic.path
    if not path:
        return {}
    folder = None if is_on_hub(path) else place.look("critic.path", path)
    return {"critic.path": str(folder or "")}
