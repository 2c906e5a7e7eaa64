"""A check: one thing that a machine must be able to do, its deadline, and what it needs.

The folder of each check beneath --logs, in which its small files outlive it.

runs/doctor/run_GRPO_with_SGLang.log    what the check printed
runs/doctor/run_GRPO_with_SGLang/       its files: the run's logs and metrics, an outcome, ...
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "MCORE_RL_KIT_FOLDER"
"""The variable by which a check's process is told its folder."""
LARGEST_KEPT_MIB = 4
"""Larger files, weights and checkpoints, are removed once the check has ended; text stays."""
_TEXT = (".log", ".jsonl", ".json", ".txt")


def find_own_folder() -> Path:
    """Return the folder of the check that this process carries out; it is empty at first."""
    return Path(os.environ[FOLDER])


def make_empty(folder: Path) -> None:
    """Make the folder, without what an earlier check has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def remove_large_files(folder: Path) -> list[str]:
    """Remove the files that are too large to keep; return their paths below the folder."""
    removed = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.suffix in _TEXT:
            continue
        if path.stat().st_size > LARGEST_KEPT_MIB << 20:
            path.unlink()
            removed.append(str(path.relative_to(folder)))
    return removed


Figures = dict[str, Any]
"""Measurements of a check: numbers or short texts, by name with unit ("copy_gb_per_s")."""


class SkipCheckError(Exception):
    """The machine lacks what the check is about; the message says what."""


class MissedTargetError(Exception):
    """The check works, but a figure misses its target."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Check:
    """`run` returns figures, or raises SkipCheckError to be skipped.

    Any other exception is a failure. A MissedTargetError is a failure that keeps its figures.

    deadline_s   after this many seconds its process and all below it are killed
    gpu          the check says nothing without a GPU
    modules      Python modules without which it is skipped
    """

    name: str
    run: Callable[[], Figures]
    deadline_s: float = 120.0
    gpu: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Checks that run one after another, each in a process of its own."""

    name: str
    text: str
    checks: tuple[Check, ...]


def make_full_name(stage: Stage, check: Check) -> str:
    """Return the name by which --checks chooses a check."""
    return f"{stage.name}:{check.name}"


@dataclass(frozen=True)
class Result:
    """A line of the report. outcome: ok, failed or skipped; `why` is empty if it is ok."""

    stage: str
    check: str
    outcome: str
    seconds: float
    why: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def expect(condition: bool, why: str) -> None:
    """Raise AssertionError with `why` if the condition is not met; also under `python -O`."""
    if not condition:
        raise AssertionError(why)
