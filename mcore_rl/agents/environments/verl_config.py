"""Loads the classes that a YAML file of verl names."""

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.loading import load_named


@cache
def read_config(path: str, section: str) -> list[dict[str, Any]]:
    """Return the entries of a section, `tools` or `interaction`; ValueError if there are none."""
    yaml = importlib.import_module("yaml")
    content = yaml.safe_load(Path(path).expanduser().read_text())
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all("class_name" in entry for entry in entries):
        raise ValueError(f"{path} has no list {section!r} whose entries have a class_name")
    return entries


def load_class(class_name: str) -> Any:
    """Return the class that verl's `package.module.Class` names."""
    return load_named(":".join(class_name.rpartition(".")[::2]))


def check_file(path: str) -> None:
    """Raise ValueError if there is no such file."""
    if not Path(path).expanduser().is_file():
        raise ValueError(f"config is {path!r}: there is no such file")
