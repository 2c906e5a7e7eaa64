"""Keeps the garbage collector away while a process makes many objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """Look for no garbage in the block; objects in no cycle are freed at once, as ever.

    A hundred thousand new objects make the collector look through all objects of the process
    several times, which in an engine takes longer than to make them. Blocks may overlap in several
    threads: collections go on when the one that stopped them ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
