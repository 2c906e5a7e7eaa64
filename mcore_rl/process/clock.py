"""Reads the clock for durations and deadlines of a run; a simulation replaces the clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Source:
    def __init__(self) -> None:
        self.read: Callable[[], float] = time.monotonic


_source = _Source()


def now_s() -> float:
    """Return the seconds since some fixed moment."""
    return _source.read()


@contextmanager
def replace_clock(read: Callable[[], float]) -> Iterator[None]:
    """Make `now_s` call `read` within the block."""
    before = _source.read
    _source.read = read
    try:
        yield
    finally:
        _source.read = before
