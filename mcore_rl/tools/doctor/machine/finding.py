"""A finding: one line of the report on a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Outcome = Literal["ok", "warning", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    text      what was found, with the values
    remedy    what to do about it; empty only if the outcome is ok
    figures   measurements by name with unit
    node      name of the node on which it was found; empty if there is one node alone
    """

    check: str
    outcome: Outcome
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self
        assert (self.outcome == "ok") == (not self.remedy), self

    def on(self, node: str) -> "Finding":
        """Return the same finding with the name of its node."""
        return replace(self, node=node)


def ok(check: str, text: str, **figures: Any) -> Finding:
    return Finding(check, "ok", text, figures=figures)


def warning(check: str, text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(check, "warning", text, remedy, figures)


def failed(check: str, text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(check, "failed", text, remedy, figures)
