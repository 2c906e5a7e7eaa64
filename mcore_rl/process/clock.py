"""Reads the clock of a run's durations and deadlines, which a simulation replaces by its own."""

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
def replaced_clock(read: Callable[[], float]) -> Iterator[None]:
    """Have `now_s` return what `read` does, for the length of the block."""
    before = _source.read
    _source.read = read
    try:
        yield
    finally:
        _source.read = before
