"""Imports of large packages, which are most of what a process does before its first step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the cyclic garbage collector off.

    Modules make objects by the hundred thousand and hardly any garbage; to walk through them again and again
    takes a quarter of the time of an import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
