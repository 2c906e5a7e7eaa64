"""Keeps the garbage collector from stopping the event loop while thousands of requests wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 10, 10)
"""Thresholds of CPython's three generations. A request that waits is some 200 objects. By default
the collector looks through all of those that wait every few thousand requests, and stops the event
loop for half a second at 2,000 of them. Counting from 50,000 objects more than before, it does so
once in hundreds of thousands of requests."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have this process look for garbage in cycles rarely; for the process that runs a gateway.

    Everything made so far, such as imported modules, is not looked through at all. Memory that is
    in no cycle is freed at once, as ever.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
