"""Keeps the garbage collector away while a process makes many objects that stay.

Speeds up imports of large packages, which take most of the time before the first step.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the cyclic garbage collector off in the body and freeze all objects afterwards.

    Modules create hundreds of thousands of objects that live as long as the process. Walking
    through them repeatedly takes a quarter of the time of an import, and seconds of each collection
    that megatron-core forces.
    """
    gc.disable()
    try:
        yield
    finally:
        collect_from_here()


def collect_from_here() -> None:
    """Turn the collector on again, for objects that are created from now on."""
    gc.freeze()
    gc.enable()


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
