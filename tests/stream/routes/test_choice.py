"""The transport of a rank: what it needs of other ranks is in the roster."""

from dataclasses import replace

import pytest

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.roster import RankFacts, make_roster
from mcore_rl.stream.routes.choice import make_routed_transport
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verify import ROWS
from mcore_rl.stream.wire import Link
from tests.support.link_ends import HOST


def make_end(machines: str) -> LinkEnd:
    """Return the end of trainer rank 0; each rank has a GPU, and no store is there."""
    link = Link("e", "127.0.0.1", 1, "key", len(machines) - 1, 1, 700, 0.2, staged=True)
    facts = [
        RankFacts(machine, (ROWS,), f"gpu-{rank}", ("gpu-0", "gpu-1"))
        for rank, machine in enumerate(machines)
    ]
    return LinkEnd.open(link, 0, HOST, roster=make_roster(facts, link))


def test_ranks_between_machines_connect_with_the_first_message_and_need_no_store() -> None:
    end = make_end("ab")
    transport = make_routed_transport(end, {1: 8}, DeviceStream(HOST))
    assert transport.memory(1) is None
    assert transport.device(1) == HOST
    transport.close()


def test_a_receiver_of_the_machine_that_does_not_come_is_named() -> None:
    end = make_end("aa")
    with pytest.raises(TransferError, match="waited in vain for rank 0 of engine e to fetch"):
        make_routed_transport(end, {1: 8}, DeviceStream(HOST))
    no_peers = make_routed_transport(replace(end, rank=0), {}, DeviceStream(HOST))
    no_peers.close()
