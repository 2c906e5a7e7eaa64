"""Direct writes: transfers between ranks in threads, into either of a receiver's two sets."""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd, OpenMemory
from mcore_rl.weight_sync.placed_bucket import RankBucket, find_holdings
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.staging import Staging
from mcore_rl.weight_sync.transports.host.direct import DirectWrites, count_direct_words
from mcore_rl.weight_sync.transports.host.segment import Segment
from mcore_rl.weight_sync.transports.select import (
    MakeTransport,
    make_gloo_transport,
    select_transport,
)
from mcore_rl.weight_sync.transports.transport import NUM_SLOTS
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice
from tests.support.link_ends import make_link, open_ends, run_ranks

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

SHAPE = (100, 50)
BOX = Box("w", (0, 0), SHAPE)
ROWS = Shard(BOX, "param", 0, (50, 1), "float32")
COLUMNS = Shard(BOX, "param", 0, (1, 100), "float32")


def soon() -> float:
    return time.monotonic() + 10


class Pair:
    """A sender and a receiver whose parameter is staged."""

    def __init__(
        self, num_buckets: int = 1, shard: Shard = ROWS, make: MakeTransport = select_transport
    ) -> None:
        self._store, link = make_link()
        sender, receiver = open_ends(link)
        self.parameters = {"param": torch.zeros(5000)}
        self.staging = Staging(self.parameters)
        assert self.staging.segments is not None
        memory = OpenMemory(self.staging.segments)
        receiver = replace(receiver, memory=memory)
        slices = [Slice(BOX, "float32")]
        buckets = plan_buckets({(0, 0): slices}, 1, -(-20_000 // num_buckets))

        def opening(end: LinkEnd, own: Shard, direct: dict[int, str]) -> Callable:
            held = [RankBucket(b, 1 - end.rank, find_holdings(b, {"w": [own]})) for b in buckets]
            return lambda: PlanExecutor(end, RankPlan("", held, XXH3, direct), make)

        self.sender, self.receiver = run_ranks(
            [opening(sender, ROWS, {1: memory.name}), opening(receiver, shard, {0: ""})]
        )

    def move(self, version: int, values: torch.Tensor) -> None:
        run_ranks(
            [
                lambda: self.sender.execute(version, {"param": values}, soon()),
                lambda: self.receiver.execute(version, self.staging.tensors, soon()),
            ]
        )


def is_direct(pair: Pair) -> bool:
    """Whether the pair shares memory for headers only."""
    words_W = pair.sender._transport.message(0, 1)
    return words_W is not None and words_W.numel() == count_direct_words(
        pair.sender.plan.buckets[0].bucket
    )


@pytest.mark.parametrize("num_buckets", [1, NUM_SLOTS, 3 * NUM_SLOTS + 1])
def test_each_version_lies_in_the_staged_set_and_the_live_one_is_untouched(
    num_buckets: int,
) -> None:
    pair = Pair(num_buckets)
    assert is_direct(pair)
    before = torch.zeros(5000)
    for version in range(5):
        values = torch.randn(5000)
        pair.move(version, values)
        assert torch.equal(pair.parameters["param"], before)
        pair.staging.version = version
        pair.staging.swap(version, pair.parameters)
        assert torch.equal(pair.parameters["param"], values)
        before = values


def test_slices_that_others_cannot_write_travel_in_buckets() -> None:
    pair = Pair(shard=COLUMNS)
    assert not is_direct(pair)
    values = torch.randn(5000)
    pair.move(1, values)
    assert torch.equal(pair.staging.tensors["param"].view(50, 100).t().reshape(-1), values)


def test_a_transport_without_shared_memory_carries_the_slices() -> None:
    pair = Pair(make=make_gloo_transport)
    assert not is_direct(pair)
    values = torch.randn(5000)
    pair.move(1, values)
    assert torch.equal(pair.staging.tensors["param"], values)


def test_a_sender_does_not_write_before_the_receiver_grants_it() -> None:
    pair = Pair()
    with pytest.raises(
        TransferError, match="rank 0 of engine engine-0 to say where version 1 goes"
    ):
        pair.sender.execute(1, {"param": torch.ones(5000)}, time.monotonic() + 0.1)
    assert not pair.parameters["param"].any()


def test_a_receiver_that_leaves_is_noticed_at_once() -> None:
    pair = Pair()
    pair.receiver.close()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="the process is gone"):
        pair.sender.execute(1, {"param": torch.ones(5000)}, soon())
    assert time.monotonic() - began_s < 2


def test_peers_are_those_that_the_receiver_opens_to() -> None:
    _store, link = make_link(num_senders=2)
    *senders, receiver = open_ends(link)
    memory = OpenMemory([Segment(4096), Segment(4096)])
    receiver = replace(receiver, memory=memory)
    first, second, opened = run_ranks(
        [
            lambda: DirectWrites(senders[0], {2: memory.name}, bool),
            lambda: DirectWrites(senders[1], {2: memory.name}, bool),
            lambda: DirectWrites(receiver, {0: "", 1: ""}, lambda peer: peer == 1),
        ]
    )
    assert (first.peers, second.peers, opened.peers) == (frozenset(), {2}, {1})
    assert DirectWrites(receiver, {}, bool).peers == frozenset()


def test_a_sender_that_writes_after_its_link_failed_reaches_no_memory_in_use() -> None:
    pair = Pair()
    values = torch.randn(5000)
    pair.move(1, values)
    pair.staging.version = 1
    pair.staging.swap(1, pair.parameters)
    with pytest.raises(TransferError, match="the time is up"):
        pair.receiver.execute(2, pair.staging.tensors, time.monotonic() + 0.05)
    newer = Staging(pair.parameters, pair.staging.find_live_segment(pair.parameters))
    newer.finish(pair.parameters)
    with pytest.raises(TransferError):
        pair.sender.execute(2, {"param": torch.full((5000,), 9.0)}, soon())
    assert (pair.staging.tensors["param"] == 9).all(), "the late sender wrote"
    assert torch.equal(pair.parameters["param"], values)
    assert torch.equal(newer.tensors["param"], values)
