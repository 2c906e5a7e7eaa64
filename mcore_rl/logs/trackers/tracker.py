"""The interface of a tracker, and what all of them share."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mcore_rl.config import TrackingConfig

Rows = Sequence[Mapping[str, Any]]
"""Rows of samples.jsonl."""
SAMPLE_COLUMNS = ("step", "prompt", "response", "reward", "ground_truth", "finish_reason")
"""Columns of a table of samples."""
SAMPLE_TABLES = ("samples/train", "samples/eval")
"""Names under which samples are logged, by split."""


class Tracker(Protocol):
    """Gets each row of metrics and some samples of each step, until the run ends."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, split: str, rows: Rows) -> None: ...

    def close(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers are told of it.

    last_step   step that the run continues from; None: it begins
    config      the recipe, without secrets
    """

    run_dir: Path
    last_step: int | None
    options: TrackingConfig
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.options.name or self.run_dir.name

    def read_id(self, file: str) -> str | None:
        """Return the id that a tracker gave the run that is resumed; None if it was not tracked."""
        path = self.run_dir / file
        return path.read_text() if self.last_step is not None and path.exists() else None


def make_table(rows: Rows) -> list[list[Any]]:
    """Return the cells of a table of samples, by SAMPLE_COLUMNS."""
    return [[_make_cell(row.get(column)) for column in SAMPLE_COLUMNS] for row in rows]


_OF_LAYER = re.compile(r"(?P<group>.+)/layer_(?P<layer>\d+)/(?P<name>.+)")


def fold_layers(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the numbers of no layer, and those of layers by a name that all layers share.

    `router/layer_3/idle_share` is in the list `router/layers/idle_share`, in the order of layers:
    a model has too many layers for a chart each.
    """
    single: dict[str, float] = {}
    layers: dict[str, dict[int, float]] = {}
    for name, value in metrics.items():
        if found := _OF_LAYER.fullmatch(name):
            folded = f"{found['group']}/layers/{found['name']}"
            layers.setdefault(folded, {})[int(found["layer"])] = value
        else:
            single[name] = value
    return single, {name: [values[i] for i in sorted(values)] for name, values in layers.items()}


def import_tracker(module: str, option: str, package: str) -> ModuleType:
    """Import a tracker's module. Raises ValueError with the remedy if its package is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{option} needs the package {package} ({error}): pip install {package}, or leave the"
            " option out"
        ) from error


def _make_cell(value: Any) -> Any:
    """Return a number or text, as a column of a tracker has one type."""
    return value if value is None or isinstance(value, int | float | str) else str(value)
