"""Names in recipes -> functions: one registry each for advantages, losses, KL, aggregation."""

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

F = TypeVar("F", bound=Callable)


class Registry(Generic[F]):
    """Functions by name; `option` is the recipe key that chooses among them."""

    def __init__(self, option: str) -> None:
        self.option = option
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            assert name not in self._functions, f"{self.option}: {name!r} is registered twice"
            self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        """Raises ValueError naming the option, the nearest name and all names."""
        if name not in self._functions:
            near = difflib.get_close_matches(name, self._functions, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"{self.option}={name!r}{hint}: expected one of {', '.join(map(repr, self.names))}"
            )
        return self._functions[name]

    @property
    def names(self) -> list[str]:
        return sorted(self._functions)
