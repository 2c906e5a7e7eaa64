"""The tree of options by dotted names: a configuration class in, its options' names, defaults,
values out.
"""

from dataclasses import MISSING, Field, fields
from functools import cache, reduce
from typing import Any

from mcore_rl.config.bounds import is_group, options_of


def leaves_under(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all options under a configuration class, each with `prefix` in front."""
    names: list[str] = []
    for name, (kind, _) in options_of(cls).items():
        dotted = f"{prefix}{name}"
        names += leaves_under(kind, f"{dotted}.") if is_group(kind) else [dotted]
    return names


def value_of(config: object, key: str) -> Any:
    """The value of the option or group `key` ("model.path") of a configuration."""
    return reduce(getattr, key.split("."), config)


@cache
def defaults_of(cls: type, key: str) -> tuple[tuple[str, Any], ...]:
    """(dotted name, default) of every option under `key`, an option or group in the tree of
    `cls`.
    """
    default: Any = cls
    kind: Any = cls
    for name in key.split("."):
        default = _default(next(f for f in fields(kind) if f.name == name))
        kind = options_of(kind)[name][0]
    if not is_group(kind):
        return ((key, default),)
    return tuple((f"{key}.{name}", value_of(default, name)) for name in leaves_under(kind))


def shown(value: object) -> str:
    """A value as a recipe spells it."""
    if value is None:
        return "null"
    if value == "":
        return "''"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return option.default
