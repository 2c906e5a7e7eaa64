"""All targets by name: the options of each, and the functions that make, submit and watch a job.

Hydra reads a launch file and overrides into the checked options of its target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launch import kuberay, local, skypilot, slurm
from launch.jobs import State, SubmittedJob
from launch.options import (
    KubeRayOptions,
    LaunchOptions,
    LocalOptions,
    SkyPilotOptions,
    SlurmOptions,
)
from launch.submission import Submission
from mcore_rl.config.overrides import quote, to_hydra
from mcore_rl.config.shipped import RECIPES_DIR


@dataclass(frozen=True)
class Target:
    """A kind of cluster.

    make_files       (submission, options) -> text by file name; pure
    submit_command   the command that a dry run prints
    submit           submits what lies in the submission's folder, and returns the job's id
    log_command      (job, follow) -> a command that prints the job's log
    """

    options: type[LaunchOptions]
    make_files: Callable[[Submission, Any], dict[str, str]]
    submit_command: Callable[[Submission], list[str]]
    submit: Callable[[Submission], str]
    read_state: Callable[[SubmittedJob], State]
    log_command: Callable[[SubmittedJob, bool], list[str]]
    cancel: Callable[[SubmittedJob], None]


def _make_target(options: type[LaunchOptions], module: Any) -> Target:
    return Target(
        options,
        module.make_files,
        module.submit_command,
        module.submit,
        module.read_state,
        module.log_command,
        module.cancel,
    )


TARGETS = {
    "local": _make_target(LocalOptions, local),
    "slurm": _make_target(SlurmOptions, slurm),
    "kuberay": _make_target(KubeRayOptions, kuberay),
    "skypilot": _make_target(SkyPilotOptions, skypilot),
}


def list_launches(folder: Path = RECIPES_DIR) -> list[str]:
    return sorted(path.stem for path in (folder / "launch").glob("*.yaml"))


def load_launch(name: str, overrides: Sequence[str]) -> LaunchOptions:
    """The options of `name`, a shipped launch file or a YAML file of one's own.

    `overrides` have the form launch.key=value. Raises ValueError naming the file, the key or the
    value at fault.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES_DIR / "launch" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(list_launches())
        raise ValueError(f"launch={name}: no file {path}; there are {known}, or give a YAML file")
    try:
        return _check_options(_compose(path, overrides))
    except YAMLError as error:
        raise ValueError(f"launch={name}: no YAML that is read here: {error}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"launch={name}: {_first_line(error)}") from None


def _compose(path: Path, overrides: Sequence[str]) -> DictConfig:
    folder = quote(f"file://{(RECIPES_DIR / 'launch').resolve()}")
    shipped = f"hydra.searchpath=[{folder}]"
    with initialize_config_dir(str(path.resolve().parent), version_base="1.3"):
        as_given = compose(path.stem, overrides=[shipped])
        options = _options_class(as_given)
        changes = [f"++{override.removeprefix('launch.')}" for override in overrides]
        readable = [to_hydra(change, options) for change in changes]
        return compose(path.stem, overrides=[shipped, *readable])


def _check_options(tree: DictConfig) -> LaunchOptions:
    structure = OmegaConf.structured(_options_class(tree))
    options: Any = OmegaConf.to_object(OmegaConf.merge(structure, tree))
    return options


def _options_class(tree: DictConfig) -> type[LaunchOptions]:
    target = tree.get("target")
    if target not in TARGETS:
        raise ValueError(f"target={target}: expected one of {', '.join(TARGETS)}")
    return TARGETS[target].options


def _first_line(error: BaseException) -> str:
    key = getattr(error, "full_key", None)
    line = str(error).strip().splitlines()[0]
    return f"launch.{key}: {line}" if key else line
