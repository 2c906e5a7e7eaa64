"""A communicator of two ranks on GPUs, by NCCL, beside any other group of the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

from torch import distributed

_NEVER = timedelta(days=1)
"""NCCL's own deadline, which only logs: those of who waits come long before."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment_lock = Lock()


def make_pair_group(store: Any, rank: int) -> Any:
    """torch's process group of ranks 0 and 1, which meet in `store`; it connects in its first operation.

    Errors are left to who asks for them: torch's default is to end the process when a peer is lost.
    """
    group_type: Any = distributed.ProcessGroupNCCL  # only where torch is built for CUDA
    options = group_type.Options()
    options._timeout = _NEVER
    with _environment(_ERROR_HANDLING, "0"):  # read when a group is made
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
