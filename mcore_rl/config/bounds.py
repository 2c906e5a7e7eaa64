"""Declares the values each option may take, and refuses the first value out of bounds.

An option without bounds may still not be NaN or infinite.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, get_type_hints

_METADATA_KEY = "bounds"


@dataclass(frozen=True)
class Range:
    """Numbers from `least` (or above `above`) to `most` (or below `below`), and the number
    `also`.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    also: float | None = None

    def allows(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        return f"must {self._interval()}" + ("" if self.also is None else f", or be {self.also:g}")

    def _interval(self) -> str:
        has_lower = self.least is not None or self.above is not None
        has_upper = self.most is not None or self.below is not None
        if has_lower and has_upper:
            lower = f"[{self.least:g}" if self.least is not None else f"({self.above:g}"
            upper = f"{self.most:g}]" if self.most is not None else f"{self.below:g})"
            return f"lie in {lower}, {upper}"
        if self.least is not None:
            return f"be at least {self.least:g}"
        if self.above is not None:
            return f"be greater than {self.above:g}"
        if self.most is not None:
            return f"be at most {self.most:g}"
        return f"be less than {self.below:g}"


@dataclass(frozen=True)
class Choices:
    """An enumeration of values."""

    values: tuple[object, ...]

    def allows(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"expected one of {', '.join(map(repr, self.values))}"


Bounds = Range | Choices


def bounded(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    also: float | None = None,
) -> Any:
    """A dataclass field for a number within bounds. None is allowed where the field's type
    allows it.

    `also`: one more number that is allowed although it lies outside.
    """
    bounds = Range(least, above, most, below, also)
    return field(default=default, metadata={_METADATA_KEY: bounds})


def one_of(default: object, values: tuple[object, ...]) -> Any:
    """A dataclass field for one of `values`."""
    return field(default=default, metadata={_METADATA_KEY: Choices(values)})


class Options:
    """Base of the configuration classes: each checks the bounds of its own options when it is made.

    `class RunConfig(Options, group="run")` says where the class stands in the tree. A class that
    stands in several places leaves it out; its errors then name the class instead of the place.
    """

    _group: ClassVar[str]

    def __init_subclass__(cls, group: str | None = None) -> None:
        cls._group = cls.__name__ if group is None else group

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self), self._group)


def check_bounds(cls: type, values: Mapping[str, Any], group: str = "") -> None:
    """Raise ValueError naming the first option of `values`, a tree of `cls`, that is out of bounds.

    A branch of the tree is a mapping; one that is an object was checked when it was made.
    `group`: dotted name of `cls` in messages ("critic.parallel").
    """
    for name, (kind, bounds) in options_of(cls).items():
        value = values[name]
        dotted = f"{group}.{name}" if group else name
        if is_group(kind):
            if isinstance(value, Mapping):
                check_bounds(kind, value, dotted)
            continue
        if any(not math.isfinite(number) for number in _floats(value)):
            raise ValueError(f"{dotted}={value}: must be finite")
        if bounds is None or value is None:
            continue
        if not bounds.allows(value):
            shown = repr(value) if isinstance(bounds, Choices) else value
            raise ValueError(f"{dotted}={shown}: {bounds}")


@cache
def options_of(cls: type) -> dict[str, tuple[Any, Bounds | None]]:
    """Type and bounds of each field of a configuration class, by name."""
    hints = get_type_hints(cls)
    return {f.name: (hints[f.name], f.metadata.get(_METADATA_KEY)) for f in fields(cls)}


def is_group(kind: object) -> bool:
    """Return whether a field of this type holds further options."""
    return isinstance(kind, type) and is_dataclass(kind)


def _floats(value: object) -> Iterable[float]:
    """The floats in a value, which may be a list or a mapping."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _floats(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _floats(inner)
