"""Processes of `run_ranks` stay until all of them have answered."""

import time

import pytest
import torch.distributed as dist

from tests.support.distributed import join_gloo, run_ranks


def ask_late(rank: int, world_size: int, port: int) -> str:
    join_gloo(rank, world_size, port)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("key", "value")
    else:
        time.sleep(1.0)
    return store.get("key").decode()


@pytest.mark.gloo
def test_a_slow_rank_still_reaches_the_store_of_rank_0() -> None:
    assert run_ranks(ask_late, 2) == ["value", "value"]
