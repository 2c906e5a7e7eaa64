"""NCCL communicators that are independent of the process's default group."""

from datetime import timedelta
from threading import Lock
from typing import Any

from torch import distributed

from mcore_rl.process.variables import set_variables

_LEFT_TO_CALLERS = timedelta(days=1)
"""The age at which torch gives a pending operation up and has it raise to whoever polls it.

Nobody waits that long: callers poll operations until deadlines of their own, and then abort the
group, which ends them. It lies above every such deadline, so that the error is the caller's, which
names the peer and what was waited for.
"""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment_lock = Lock()


def make_group(store: Any, rank: int, size: int, max_ctas: int | None = None) -> Any:
    """Return torch's process group of ranks 0 to `size` - 1, which find each other through `store`.

    It connects in its first operation. Its errors are raised to the caller; torch's default is to
    end the process when a peer is lost. NCCL's kernels get at most `max_ctas` blocks.
    """
    group_type: Any = distributed.ProcessGroupNCCL  # exists only in CUDA builds of torch
    options = group_type.Options()
    options._timeout = _LEFT_TO_CALLERS
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    # torch reads it when a group is made
    with _environment_lock, set_variables({_ERROR_HANDLING: "0"}):
        return group_type(store, rank, size, options)
