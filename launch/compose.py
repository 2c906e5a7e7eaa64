"""Reads a launch file and overrides with Hydra, and returns the checked options of its target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.options import LaunchOptions
from launch.targets import TARGETS
from mcore_rl.config.shipped import RECIPES_DIR


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
        return _checked(_compose(path, overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"launch={name}: {_first_line(error)}") from None


def _compose(path: Path, overrides: Sequence[str]) -> DictConfig:
    shipped = f"hydra.searchpath=[file://{(RECIPES_DIR / 'launch').resolve()}]"
    changes = [f"++{override.removeprefix('launch.')}" for override in overrides]
    with initialize_config_dir(str(path.resolve().parent), version_base="1.3"):
        return compose(path.stem, overrides=[shipped, *changes])


def _checked(tree: DictConfig) -> LaunchOptions:
    target = tree.get("target")
    if target not in TARGETS:
        raise ValueError(f"target={target}: expected one of {', '.join(TARGETS)}")
    options: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(TARGETS[target].options), tree)
    )
    return options


def _first_line(error: BaseException) -> str:
    key = getattr(error, "full_key", None)
    line = str(error).strip().splitlines()[0]
    return f"launch.{key}: {line}" if key else line
