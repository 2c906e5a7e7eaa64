"""A process gets out of a collective, and its rank meets others anew; tests/gpu has NCCL's part."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from mcore_rl.config import ParallelConfig
from mcore_rl.device import communicators
from mcore_rl.process.network import find_free_port
from mcore_rl.train.runtime import init_distributed, leave_groups
from tests.support.distributed import run_ranks

TIMEOUT_S = 60.0
"""Far above what an abort takes."""
NUM_ROUNDS = 4


def meet(rank: int, size: int, port: int) -> None:
    init_distributed(
        rank, size, "127.0.0.1", port, ParallelConfig(dp=size), seed=0, timeout_s=TIMEOUT_S
    )


def abort_soon(delay_s: float) -> threading.Thread:
    def abort() -> None:
        time.sleep(delay_s)
        communicators.abort_communicators()

    thread = threading.Thread(target=abort)
    thread.start()
    return thread


def find_error(wait: Callable[[], object]) -> str:
    """Return what a wait raises once it is aborted."""
    began_s = time.monotonic()
    try:
        wait()
    except RuntimeError as error:
        assert time.monotonic() - began_s < TIMEOUT_S / 4, "its own timeout ended it"
        return str(error)
    return ""


def count_held() -> tuple[int, int]:
    """Return the descriptors and the threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def wait_and_meet_again(
    rank: int, size: int, port: int, ports: Sequence[int]
) -> list[tuple[tuple[str, str], float, tuple[int, int]]]:
    """By round: errors of two collectives, a sum of the round before, what is held afterwards."""
    rounds = []
    for each in ports:
        meet(rank, size, each)
        total_1 = torch.tensor([float(rank)])
        dist.all_reduce(total_1)
        if rank == size - 1:  # never comes, and so the others wait for one another
            aborting = abort_soon(0.6)
            errors = ("", "")
        else:
            # At their own times, as orders of a controller come.
            aborting = abort_soon(0.3 + 0.1 * rank)
            receive = partial(dist.recv, torch.zeros(1), size - 1)
            errors = (find_error(receive if rank else dist.barrier), find_error(dist.barrier))
        aborting.join()
        leave_groups()
        communicators.destroy_communicators()
        assert communicators.can_meet_again() and not dist.is_initialized()
        rounds.append((errors, float(total_1), count_held()))
    return rounds


def test_ranks_get_out_of_collectives_and_meet_again() -> None:
    ports = [find_free_port("127.0.0.1") for _ in range(NUM_ROUNDS)]
    told = run_ranks(wait_and_meet_again, 3, ports)
    for rounds in told[:2]:
        assert all("losed" in first and later for (first, later), _, _ in rounds), rounds
    for rounds in told:
        assert all(total == 3.0 for _, total, _ in rounds)
        held = [of_round for _, _, of_round in rounds]
        assert held[-1] == held[0], f"descriptors and threads grow: {held}"


def wait_for_absent(rank: int, size: int, port: int) -> str:
    """Abort while a rank waits for one that never joins."""
    aborting = abort_soon(0.5)
    error = find_error(lambda: meet(rank, size + 1, port))
    aborting.join()
    return error


def test_a_rank_that_waits_for_others_to_join_gets_out() -> None:
    [error] = run_ranks(wait_for_absent, 1)
    assert error
