"""Loads the classes that a YAML file of verl names."""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.loading import describe_failure, load_named


@cache
def read_config(path: str, section: str) -> list[dict[str, Any]]:
    """Return the entries of a section, `tools` or `interaction`; ValueError if there are none."""
    yaml = importlib.import_module("yaml")
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config is {path!r}, which is no YAML: {error}") from error
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all("class_name" in entry for entry in entries):
        raise ValueError(f"{path} has no list {section!r} whose entries have a class_name")
    return entries


def load_class(class_name: str) -> Any:
    """Return the class that verl's `package.module.Class` names."""
    return load_named(":".join(class_name.rpartition(".")[::2]))


def check_classes(path: str, section: str) -> None:
    """Raise ValueError, with a remedy, if a class that a section names cannot be imported."""
    for entry in read_config(path, section):
        name = entry["class_name"]
        try:
            load_class(name)
        except ValueError as error:
            raise ValueError(f"config is {path!r}, with class_name {name}: {error}") from error
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ValueError(
                f"config is {path!r}, with class_name {name}: {describe_failure(error)}"
            ) from error


def check_file(path: str) -> None:
    """Raise ValueError if there is no such file."""
    if not Path(path).expanduser().is_file():
        raise ValueError(f"config is {path!r}: there is no such file")
