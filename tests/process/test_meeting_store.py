"""The store at which ranks meet listens at its address only, ours and torch's own rendezvous."""

from datetime import timedelta

import psutil
import pytest

from mcore_rl.process.network import (
    bind_meetings_to_their_host,
    make_meeting_store,
    stay_on_loopback,
)
from tests.support.distributed import run_ranks

TIMEOUT = timedelta(seconds=60)


def meet(rank: int, world_size: int, port: int, kind: str) -> tuple[float, bool, set[str]]:
    """Return a sum over ranks, whether this rank listens at `port`, and at which addresses."""
    import torch
    import torch.distributed as dist

    stay_on_loopback()
    ranks = {"rank": rank, "world_size": world_size, "timeout": TIMEOUT}
    if kind == "rendezvous":
        bind_meetings_to_their_host()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **ranks)
    else:
        store = make_meeting_store("127.0.0.1", port, rank, world_size, TIMEOUT)
        dist.init_process_group("gloo", store=store, **ranks)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    dist.new_group([0, 1])
    connections = psutil.Process().net_connections()
    listening = {each.laddr for each in connections if each.status == "LISTEN"}
    dist.barrier()
    return total.item(), port in {at.port for at in listening}, {at.ip for at in listening}


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["rendezvous", pytest.param("store", marks=pytest.mark.slow)])
def test_ranks_meet_and_listen_on_loopback_only(kind: str) -> None:
    loopback = {"127.0.0.1"}
    assert run_ranks(meet, 2, kind) == [(3.0, True, loopback), (3.0, False, loopback)]
