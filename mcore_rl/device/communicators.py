"""Ends the communicators of a process that goes on, so that its rank can meet others anew.

    one thread        a collective waits for a rank that is gone ---- error, so its call ends
    another thread    abort_communicators ------------------------'
    afterwards        destroy_communicators: there are none any more, and others can be made

NCCL ends its kernels itself (ncclCommAbort). torch's gloo would close connections, and leave who
waits at their own end waiting until its timeout. So connections are shut as if the other end had.
"""

import gc
import sys
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import distributed as dist

from mcore_rl.device import empty_cache, has_cuda, synchronize, unpin_all
from mcore_rl.device.deep_ep import holds_peers
from mcore_rl.process.connections import Connections

CONNECTIONS = Connections()
"""Those of the ranks' groups and of the store where they meet: they are made in its `note`."""
_lock = Lock()


def abort_communicators() -> None:
    """Have every collective of this process raise, also those to come; call it in any thread."""
    with _lock:
        try:
            _abort_nccl()
        finally:
            CONNECTIONS.end()


def destroy_communicators() -> None:
    """Forget all process groups, so that others can be made; no collective may run any more.

    What nobody refers to any more is freed, on the device and on the host.
    """
    abort_communicators()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    unpin_all()
    empty_cache()


def can_meet_again() -> bool:
    """Return whether this process can have other groups, once its own are destroyed.

    It cannot where a failed kernel has spoiled its CUDA context, or DeepEP holds on to lost ranks.
    """
    if holds_peers():
        return False
    try:
        if has_cuda():
            torch.ones(1, device="cuda")
        synchronize()
    except RuntimeError as error:
        print(f"the device fails this process: {error}", file=sys.stderr)
        return False
    return True


def _abort_nccl() -> None:
    """Abort NCCL's communicators together: one after another, aborts may wait for each other.

    As torch's _abort_process_group does, but the groups stay known to torch: another thread may be
    using them.
    """
    if not has_cuda() or not dist.is_initialized():
        return
    backends = _list_nccl_backends()
    if not backends:
        return
    backends[-1]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[-1]._group_end()


def _list_nccl_backends() -> list[Any]:
    """Return those of all groups, of the newest first; groups of gloo alone have none."""
    world: Any = dist.distributed_c10d._world
    names = dict(world.pg_names)  # the thread of a call may be making more of them
    backends = []
    for group in sorted(names, key=lambda group: names[group], reverse=True):
        with suppress(RuntimeError):  # it has no backend for GPUs
            backend = group._get_backend(torch.device("cuda"))
            # with TORCH_DISTRIBUTED_DEBUG=DETAIL another one stands before it
            backends.append(getattr(backend, "wrapped_pg", backend))
    return backends
