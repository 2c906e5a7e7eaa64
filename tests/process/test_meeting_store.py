"""The store at which ranks meet listens at its address only, ours and torch's own rendezvous."""

import subprocess
import sys

import pytest

from mcore_rl.process.network import find_free_port

RANK = """
import os, sys
from datetime import timedelta
import psutil
import torch
import torch.distributed as dist
from mcore_rl.process.network import bind_meetings_to_their_host, make_meeting_store
from mcore_rl.process.network import stay_on_loopback

kind, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
timeout = timedelta(seconds=60)
stay_on_loopback()
if kind == "rendezvous":
    bind_meetings_to_their_host()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout
    )
else:
    store = make_meeting_store("127.0.0.1", port, rank, 2, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.new_group([0, 1])
listening = {
    connection.laddr
    for connection in psutil.Process().net_connections()
    if connection.status == "LISTEN"
}
print(total.item(), port in {at.port for at in listening}, {at.ip for at in listening})
dist.barrier()
"""


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["rendezvous", pytest.param("store", marks=pytest.mark.slow)])
def test_ranks_meet_and_listen_on_loopback_only(kind: str) -> None:
    port = find_free_port("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, kind, str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert answers == ["3.0 True {'127.0.0.1'}", "3.0 False {'127.0.0.1'}"]
