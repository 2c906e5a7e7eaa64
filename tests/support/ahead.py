"""Starts what a test waits for while the test before it still runs."""

from collections.abc import Callable
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


class StartedAhead(Generic[T]):
    """Yield what each of `cases` needs, in the order in which tests take it.

    `started` collects everything that was begun.
    """

    def __init__(self, cases: list[str], start: Callable[[str], T], num_ahead: int) -> None:
        """`start` returns at once; `num_ahead` cases start together with the one that is taken."""
        self._coming, self._start, self._num_ahead = cases, start, num_ahead
        self.started: dict[str, T] = {}

    def take(self, case: str) -> T:
        now, self._coming = (
            self._coming[: self._num_ahead + 1],
            [c for c in self._coming if c != case],
        )
        for name in (case, *now):
            if name not in self.started:
                self.started[name] = self._start(name)
        return self.started[case]


def chosen_cases(request: pytest.FixtureRequest, name: str = "case") -> list[str]:
    """Return a parameter's value of each test of this module that is to run, in their order."""
    items = [item for item in request.session.items if item.path == request.path]
    functions = [item for item in items if isinstance(item, pytest.Function)]
    specs = [item.callspec for item in functions if hasattr(item, "callspec")]
    return [str(spec.params[name]) for spec in specs if name in spec.params]
