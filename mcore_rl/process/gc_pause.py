"""Pauses the garbage collector while a process creates many lasting objects.

Imports of large packages, most of the time before the first step, are faster without collections.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the cyclic garbage collector off in the block and freeze all objects afterwards.

    Modules create hundreds of thousands of objects that live as long as the process. Collections
    walk through them: repeatedly during an import, for a quarter of its time, and for seconds in
    each collection that megatron-core forces.
    """
    gc.disable()
    try:
        yield
    finally:
        collect_from_here()


def collect_from_here() -> None:
    """Turn the collector on again, only for objects that are created from now on."""
    gc.freeze()
    gc.enable()


@contextmanager
def pause_collections() -> Iterator[None]:
    """Pause collections in the block; objects outside cycles are still freed at once.

    A hundred thousand new objects make the collector walk through all objects of the process
    several times, which in an engine takes longer than creating them. Blocks of several threads may
    overlap: collections go on when the block that paused them ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
