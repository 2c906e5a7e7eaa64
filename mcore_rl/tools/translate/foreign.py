"""Another system's options by dotted name, and what a translation of them consists of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

V = TypeVar("V")


@dataclass(frozen=True)
class RecipeLine:
    """An option of the recipe, and the options that it was made of."""

    key: str
    value: Any
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """An option that is the user's to decide on: it has no counterpart, or more than one."""

    source: str
    value: Any
    advice: str


@dataclass(frozen=True)
class Unneeded:
    """An option that a recipe does without."""

    source: str
    value: Any
    reason: str


Found = Iterator[RecipeLine | Decision]


def says(value: Any) -> bool:
    """Return whether an option's value is more than that of one that is left out."""
    return value not in (None, False, "", [], {})


@dataclass
class ForeignOptions:
    """Options by name; those that are read are remembered.

    given         the options that the input has
    is_whole      whether the input is a whole configuration, whose defaults nobody chose
    config_name   of the configuration whose defaults hold for what is not given, or of the program
                  that takes the options; empty: unknown
    unreadable    options whose value the input computes, and the text that computes it
    """

    given: Mapping[str, Any]
    is_whole: bool
    config_name: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def take(self, name: str, default: V) -> V:
        """Return an option, or what the other system takes if it is left out or null."""
        self.read.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def take_list(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """Return an option that is a list of texts, or a single one."""
        value: Any = self.take(name, default)
        return [value] if isinstance(value, str) else list(value)

    def below(self, prefix: str, but: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the options whose names begin with `prefix`, without it, except nulls.

        Names that go on with one of `but` are neither returned nor read.
        """
        begins = tuple(f"{prefix}{name}" for name in but)
        names = [n for n in self.given if n.startswith(prefix) and not n.startswith(begins)]
        self.read.update(names)
        return {
            name.removeprefix(prefix): self.given[name]
            for name in names
            if self.given[name] is not None
        }

    def left(self) -> dict[str, Any]:
        """Return the options that nobody has read, except those that say nothing."""
        return {
            name: value
            for name, value in self.given.items()
            if name not in self.read and says(value)
        }
