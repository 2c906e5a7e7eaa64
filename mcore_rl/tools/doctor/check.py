"""A check: one thing that a machine must be able to do, its deadline, and what it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, Any]
"""Measurements of a check: numbers or short texts, by name with unit ("copy_gb_per_s")."""


class SkipCheck(Exception):
    """The machine lacks what the check is about; the message says what."""


class MissedTarget(Exception):
    """The check works, but a figure misses its target."""

    def __init__(self, why: str, figures: Figures) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Check:
    """`run` returns figures. It raises SkipCheck to be skipped; any other exception is a failure.

    A MissedTarget is a failure that keeps its figures.

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


def full_name(stage: Stage, check: Check) -> str:
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
