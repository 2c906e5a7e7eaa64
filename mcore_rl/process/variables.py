"""Sets environment variables of this process and its children for a block.

A thread that reads a variable while another adds one crashes: the C library moves the whole list
(glibc, getenv(3), "Attributes"). So variables are not added while threads of other libraries run.
"""

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


@contextmanager
def restore_variables() -> Iterator[None]:
    """Restore all variables after a block that sets some; threads that read them must be gone."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
