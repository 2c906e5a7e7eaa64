"""Imports of large packages, which are most of what a process does before its first step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the cyclic garbage collector off, and afterwards away from what there is by then.

    Modules make objects by the hundred thousand, which live as long as the process. To walk through them
    again and again takes a quarter of the time of an import, and seconds of each collection that
    megatron-core forces.
    """
    gc.disable()
    try:
        yield
    finally:
        collect_from_here()


def collect_from_here() -> None:
    """Have the collector run again, and leave alone what there is already."""
    gc.freeze()
    gc.enable()
