"""Runs a function on several processes that talk over gloo; returns results in rank order.

A failure raises with every rank's traceback. The processes are forks of a server that has imported
torch and megatron-core once, so that a launch is cheap.
"""

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from mcore_rl.device.setup import let_megatron_import
from mcore_rl.process.network import find_free_port

PRELOAD = [
    "torch",
    "mcore_rl.train.actor",
    "pytest",
    # Ranks would import these anew: patches on a CPU, and modules of Megatron's optimizers.
    "mcore_rl.cpu.kernel_patches",
    "mcore_rl.cpu.megatron_patches",
    "mcore_rl.device.training_patches",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.post_training.modelopt.layers",
]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """Return fn(rank, world_size, port, *args) of `world_size` processes, in rank order.

    `port` is free for rank 0's store; `fn` must be importable by name. Raises AssertionError with
    the traceback of each rank that failed or did not answer within `timeout_s`.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port = find_free_port("127.0.0.1")
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        call = pickle.dumps((fn, rank, world_size, port, args))
        process = context.Process(target=_rank_main, args=(theirs, call), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect([ours for _, ours in ranks], timeout_s)
    finally:
        for _, ours in ranks:
            ours.close()
        for process, _ in ranks:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def join_gloo(rank: int, world_size: int, port: int) -> None:
    """Make torch's default group of the ranks of `run_ranks`, without those of megatron-core."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)


def run_alone(fn: Callable[..., Any], *args: Any) -> Any:
    """Return fn(*args) of a fresh process, the only rank of megatron-core's process groups."""
    return run_ranks(_alone, 1, fn, *args)[0]


def _alone(rank: int, world_size: int, port: int, fn: Callable[..., Any], *args: Any) -> Any:
    from mcore_rl.config import ParallelConfig
    from mcore_rl.train.runtime import init_distributed

    init_distributed(rank, world_size, "127.0.0.1", port, ParallelConfig(), seed=0, timeout_s=60)
    return fn(*args)


def run_each(
    fn: Callable[..., Any],
    world_size: int,
    cases: Iterable[Any],
    *args: Any,
    timeout_s: float = 300.0,
) -> list[list[Any]]:
    """Return fn(rank, world_size, port, *args, case) by case, then by rank.

    Each case has processes of its own, since a training step leaves its model and the threads of
    its process groups behind. Cases with fewer processes than there are cores run side by side.
    """
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // world_size)) as pool:
        running = [
            pool.submit(run_ranks, fn, world_size, *args, case, timeout_s=timeout_s)
            for case in cases
        ]
        return [case.result() for case in running]


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(connections))
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting.values()), timeout=left)
        for rank in [r for r, c in waiting.items() if c in ready]:
            try:
                succeeded, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                succeeded, value = False, "the process died"
            (results if succeeded else errors)[rank] = value
        if errors:  # the other ranks may wait for the failed one; give them a moment to fail, too
            deadline = min(deadline, time.monotonic() + 3.0)
    for rank in waiting:
        errors[rank] = f"no answer within {timeout_s:.0f} s or after another rank's failure"
    assert not errors, "".join(
        f"\n--- rank {rank}: {text}" for rank, text in sorted(errors.items())
    )
    return [results[rank] for rank in sorted(results)]


def _rank_main(connection: Connection, call: bytes) -> None:
    """Make the call, whose function is imported only once Megatron can be.

    Another test may have started the server of forks, without what is preloaded here.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.freeze()
    try:
        import torch

        torch.set_num_threads(1)
        let_megatron_import()
        fn, rank, world_size, port, args = pickle.loads(call)
        answer = (True, fn(rank, world_size, port, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # plain pickle sends tensors by value; multiprocessing's would share their memory
    connection.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError):  # rank 0 holds the store that slower ranks still ask
        connection.recv_bytes()
    connection.close()
