"""Holds which fields of an upstream class a recipe may not set, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """The fields of an upstream class that a recipe may not set, or only to some values.

    refused    field -> what to do instead, or why there is nothing to do
    prefixes   beginning of a field's name -> the same for all fields that begin so
    values     field -> (allowed values, why others are refused)
    """

    refused: Mapping[str, str]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)

    def refusal(self, name: str) -> str | None:
        """Return why the field is refused; None if a recipe may set it."""
        if name in self.refused:
            return self.refused[name]
        return next((why for start, why in self.prefixes.items() if name.startswith(start)), None)


def with_reason(reason: str, *names: str) -> dict[str, str]:
    """Return {name: reason} for all names."""
    return dict.fromkeys(names, reason)
