"""Speeds up imports of large packages, which take most of the time before the first step."""

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
