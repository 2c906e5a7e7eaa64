"""The transport of a rank: what it needs of other ranks is in the roster."""

from dataclasses import replace

import pytest

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import RankBucket
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.transports.select import select_transport, waits_for_peers
from mcore_rl.weight_sync.verify import ROWS
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.box import Box
from mcore_rl.weights.plan.shared_region import Slice
from tests.support.link_ends import HOST


def make_end(machines: str, delta: str = "off", staged: bool = True) -> LinkEnd:
    """Return the end of trainer rank 0; each rank has a GPU, and no store is there."""
    num_senders = len(machines) - 1
    link = Link("e", "127.0.0.1", 1, "key", num_senders, 1, 700, 0.2, staged=staged, delta=delta)
    facts = [
        RankFacts(machine, (ROWS,), f"gpu-{rank}", ("gpu-0", "gpu-1"))
        for rank, machine in enumerate(machines)
    ]
    return LinkEnd.open(link, 0, HOST, roster=make_roster(facts, link))


def make_plan(peers: list[int]) -> RankPlan:
    (bucket,) = plan_buckets({(0, 0): [Slice(Box("w", (0,), (8,)), "float32")]}, 1, 700)
    return RankPlan("", [RankBucket(bucket, peer, ()) for peer in peers], ROWS, {})


def test_ranks_between_machines_connect_with_the_first_message_and_need_no_store() -> None:
    end = make_end("ab")
    transport = select_transport(end, make_plan([1]), DeviceStream(HOST))
    assert transport.message(0, 1) is None
    assert transport.device(1) == HOST
    transport.close()


@pytest.mark.parametrize(
    ("machines", "delta", "staged", "waits"),
    [
        ("ab", "off", True, False),  # connects with the first message
        ("ab", "off", False, True),
        ("aa", "off", True, True),
        ("ab", "always", True, True),  # all ranks make a gloo group
        ("abb", "off", True, False),
        ("aba", "off", True, True),
    ],
)
def test_a_rank_waits_for_peers_unless_all_are_on_other_machines_of_a_staged_link(
    machines: str, delta: str, staged: bool, waits: bool
) -> None:
    assert waits_for_peers(make_end(machines, delta=delta, staged=staged)) == waits


def test_a_receiver_of_the_machine_that_does_not_come_is_named() -> None:
    end = make_end("aa")
    with pytest.raises(TransferError, match="waited in vain for rank 0 of engine e to fetch"):
        select_transport(end, make_plan([1]), DeviceStream(HOST))
    no_peers = select_transport(replace(end, rank=0), make_plan([]), DeviceStream(HOST))
    no_peers.close()
