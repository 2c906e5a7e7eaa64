"""Sets environment variables of this process and its children for a block."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def set_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables within the block, unset those that are None, and restore all afterwards."""
    before = {name: os.environ.get(name) for name in values}
    _apply(values)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
