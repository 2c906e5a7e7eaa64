"""An NCCL communicator of two ranks, independent of the process's other groups."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

from torch import distributed

_NEVER = timedelta(days=1)
"""NCCL's own timeout, which only logs. Callers wait with much shorter deadlines of their own."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment_lock = Lock()


def make_pair_group(store: Any, rank: int) -> Any:
    """Return torch's process group of ranks 0 and 1, which find each other through `store`.

    It connects in its first operation. Its errors are raised to the caller; torch's default is to
    end the process when a peer is lost.
    """
    group_type: Any = distributed.ProcessGroupNCCL  # exists only in CUDA builds of torch
    options = group_type.Options()
    options._timeout = _NEVER
    with _environment(_ERROR_HANDLING, "0"):  # torch reads it when a group is made
        return group_type(store, rank, 2, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    with _environment_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
