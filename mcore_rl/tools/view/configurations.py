"""Compares the configurations of runs, option by option, with one another and with defaults."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.config import Config
from mcore_rl.config.tree import defaults_of, flatten, leaves_under

Options = dict[str, str]


def read_options(run_dir: Path) -> Options:
    """Return the options of config.yaml by dotted name, as text; {} if there is none."""
    path = run_dir / "config.yaml"
    return dict(_read_options(path, path.stat().st_mtime_ns)) if path.exists() else {}


@lru_cache(32)
def _read_options(path: Path, changed_ns: int) -> Options:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8", errors="replace"), yaml.CSafeLoader)
    except yaml.YAMLError:  # a run is writing it
        return {}
    if not isinstance(tree, dict):
        return {}
    return {name: show_value(value) for name, value in flatten(tree).items()}


@cache
def read_defaults() -> Options:
    """Return the default of each option of a recipe, as text."""
    names = {name.partition(".")[0] for name in leaves_under(Config)}
    return {
        key: show_value(value) for name in sorted(names) for key, value in defaults_of(Config, name)
    }


def show_value(value: object) -> str:
    """Return a value as a recipe has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple):
        return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    return str(value)


def compare(columns: Sequence[Options]) -> list[dict[str, Any]]:
    """Return {"option", "values", "differs"} of every option; None where a run has none."""
    names = {name: None for options in columns for name in options}
    rows = []
    for name in names:
        values = [options.get(name) for options in columns]
        rows.append({"option": name, "values": values, "differs": len(set(values)) > 1})
    return rows
