"""Declares the values that each option may take, and refuses the first value out of bounds.

    steps: int = bounded(100, ge=1)                     a number within bounds
    mode: Literal["sync", "async"] = "sync"             one of the values that are listed

An option without bounds may still not be NaN or infinite.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, reduce
from inspect import get_annotations
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_METADATA_KEY = "bounds"
N = TypeVar("N", bound=float | None)


@dataclass(frozen=True)
class Range:
    """Numbers from `ge` (or above `gt`) to `le` (or below `lt`), and the number `also`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: float | None = None

    def allows(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        return f"must {self._interval()}" + ("" if self.also is None else f", or be {self.also:g}")

    def _interval(self) -> str:
        has_lower = self.ge is not None or self.gt is not None
        has_upper = self.le is not None or self.lt is not None
        if has_lower and has_upper:
            lower = f"[{self.ge:g}" if self.ge is not None else f"({self.gt:g}"
            upper = f"{self.le:g}]" if self.le is not None else f"{self.lt:g})"
            return f"lie in {lower}, {upper}"
        if self.ge is not None:
            return f"be at least {self.ge:g}"
        if self.gt is not None:
            return f"be greater than {self.gt:g}"
        if self.le is not None:
            return f"be at most {self.le:g}"
        return f"be less than {self.lt:g}"


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
    default: N,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    also: float | None = None,
) -> N:
    """Return a dataclass field for a number within bounds, or for None where its type allows it.

    `also`: one more number that is allowed although it lies outside.
    """
    return field(default=default, metadata={_METADATA_KEY: Range(ge, gt, le, lt, also)})


class Options:
    """Base of the configuration classes: each checks the bounds of its own options when it is made.

    `class RunConfig(Options, group="run")` says where the class stands in the tree. A class that
    stands in several places leaves it out; its errors then name the class instead of the place.
    OmegaConf, which reads the fields' types, knows no Literal. A class shows it `str`, and keeps
    the choices with the field's bounds.
    """

    _group: ClassVar[str]

    def __init_subclass__(cls, group: str | None = None) -> None:
        cls._group = cls.__name__ if group is None else group
        for name, kind in get_annotations(cls).items():
            if choices := _list_choices(kind):
                cls.__annotations__[name] = _replace_literals(kind)
                bounds = {_METADATA_KEY: Choices(choices)}
                setattr(cls, name, field(default=getattr(cls, name), metadata=bounds))

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


def _split_union(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _list_choices(kind: Any) -> tuple[object, ...]:
    """Return the values that a type with a Literal allows besides None; none without a Literal."""
    parts = _split_union(kind)
    if not any(get_origin(part) is Literal for part in parts):
        return ()
    values = [(True, False) if part is bool else get_args(part) for part in parts]
    return tuple(value for choices in values for value in choices)


def _replace_literals(kind: Any) -> Any:
    parts = [str if get_origin(part) is Literal else part for part in _split_union(kind)]
    return reduce(operator.or_, parts)


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
