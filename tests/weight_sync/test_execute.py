"""Plans executed by ranks in threads, over shared memory and over gloo."""

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.execute import PlanExecutor, VerifiedBuckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import RankBucket, find_holdings
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.transports.host.direct import count_direct_words
from mcore_rl.weight_sync.transports.select import (
    MakeTransport,
    make_delta_transport,
    make_gloo_transport,
    plan_slots,
    select_transport,
)
from mcore_rl.weight_sync.transports.transport import NUM_SLOTS
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice
from tests.support.link_ends import make_link, open_ends, run_ranks

NUMEL = 1000
SHARD = Shard(Box("w", (0,), (NUMEL,)), "param", 0, (1,), "float32")


def make_buckets(num_buckets: int) -> list[Bucket]:
    """One tensor cut into buckets from trainer rank 0 to engine rank 0."""
    bucket_bytes = 4 * -(-NUMEL // num_buckets)
    return plan_buckets({(0, 0): [Slice(SHARD.box, "float32")]}, 1, bucket_bytes)


def open_executors(
    make_transport: MakeTransport, num_buckets: int, timeout_s: float = 10.0
) -> tuple[PlanExecutor, PlanExecutor, object]:
    """The sender's, the receiver's, and the store, which must outlive them."""
    store, link = make_link(timeout_s=timeout_s)
    buckets = make_buckets(num_buckets)

    def opening(end: LinkEnd) -> Callable[[], PlanExecutor]:
        own = [
            RankBucket(bucket, 1 - end.rank, find_holdings(bucket, {"w": [SHARD]}))
            for bucket in buckets
        ]
        return lambda: PlanExecutor(end, RankPlan("", own, XXH3, {}), make_transport)

    sender, receiver = run_ranks([opening(end) for end in open_ends(link)])
    return sender, receiver, store


def soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("num_buckets", [1, NUM_SLOTS, 3 * NUM_SLOTS + 1])
@pytest.mark.parametrize(
    "make_transport", [select_transport, make_gloo_transport, make_delta_transport]
)
def test_each_version_arrives_exactly_in_either_set_of_tensors(
    make_transport: MakeTransport, num_buckets: int
) -> None:
    sender, receiver, _store = open_executors(make_transport, num_buckets)
    sets = [{"param": torch.zeros(NUMEL)} for _ in range(2)]
    for version in range(4):
        values = torch.arange(NUMEL) * (version + 1.5)
        tensors = sets[version % 2]
        run_ranks(
            [
                lambda v=values, n=version: sender.execute(n, {"param": v}, soon()),
                lambda t=tensors, n=version: receiver.execute(n, t, soon()),
            ]
        )
        assert torch.equal(tensors["param"], values)
    sender.close()
    receiver.close()


def test_verified_buckets_can_be_forwarded_with_the_sums_they_came_with() -> None:
    first, relay_in, _store = open_executors(select_transport, 5)
    relay_out, last, _relay_store = open_executors(select_transport, 5)
    values = torch.randn(NUMEL)
    relayed = {"param": torch.zeros(NUMEL)}
    arrived = {"param": torch.zeros(NUMEL)}
    verified = VerifiedBuckets()
    run_ranks(
        [
            lambda: first.execute(1, {"param": values}, soon()),
            lambda: relay_in.execute(1, relayed, soon(), verified),
            lambda: relay_out.execute(1, relayed, soon(), verified),
            lambda: last.execute(1, arrived, soon()),
        ]
    )
    assert torch.equal(arrived["param"], values)


def test_a_failure_at_one_end_is_told_to_the_other() -> None:
    sender, receiver, _store = open_executors(select_transport, 3 * NUM_SLOTS)
    errors: list[TransferError] = []

    def act(executor: PlanExecutor, version: int) -> None:
        try:
            executor.execute(version, {"param": torch.zeros(NUMEL)}, time.monotonic() + 10)
        except TransferError as error:
            errors.append(error)

    began_s = time.monotonic()
    run_ranks([lambda: act(sender, 1), lambda: act(receiver, 2)])
    assert time.monotonic() - began_s < 5
    cause, consequence = errors
    assert "sent version 1 bucket 0" in str(cause) and not cause.peer_lost
    assert "rank 0 of engine engine-0: trainer rank 0 sent version 1" in str(consequence)
    assert consequence.peer_lost


def test_a_sender_that_does_not_send_is_named_with_the_bucket_at_the_deadline() -> None:
    _sender, receiver, _store = open_executors(select_transport, 2)
    with pytest.raises(
        TransferError, match=r"version 3 bucket 0 \(w\) from trainer rank 0: the time is up"
    ):
        receiver.execute(3, {"param": torch.zeros(NUMEL)}, time.monotonic() + 0.05)


def test_a_link_that_carries_nothing_takes_no_memory_for_messages() -> None:
    _store, link = make_link()
    huge = Shard(Box("w", (0,), (2**50,)), "param", 0, (1,), "float32")
    (bucket,) = plan_buckets({(0, 0): [Slice(huge.box, "float32")]}, 1, 2**60)

    def opening(end: LinkEnd) -> Callable[[], PlanExecutor]:
        own = [RankBucket(bucket, 1 - end.rank, find_holdings(bucket, {"w": [huge]}))]
        return lambda: PlanExecutor(end, RankPlan("", own, XXH3, {}), make_gloo_transport)

    sender, _ = run_ranks([opening(end) for end in open_ends(link)])
    with pytest.raises(TransferError, match=r"^no memory for messages of \d+\.\d MiB: "):
        sender.execute(0, {"param": torch.zeros(1)}, soon())


@given(
    peers=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 300), min_size=20, max_size=20),
)
def test_buckets_of_a_peer_that_are_in_flight_together_never_overlap(
    peers: list[int], sizes: list[int]
) -> None:
    buckets = []
    for peer, size in zip(peers, sizes, strict=False):
        box = Box("w", (0,), (size,))
        (bucket,) = plan_buckets({(0, 0): [Slice(box, "float32")]}, 1, 1 << 20)
        buckets.append(RankBucket(bucket, peer, ()))
    slots, shared_words = plan_slots(buckets)
    assert set(shared_words) == set(peers)
    for peer in shared_words:
        spans = [
            (slot.start, slot.stop)
            for own, slot in zip(buckets, slots, strict=True)
            if own.peer == peer
        ]
        assert max(stop for _, stop in spans) <= shared_words[peer]
        for i, (start, stop) in enumerate(spans):
            for other_start, other_stop in spans[i + 1 : i + NUM_SLOTS]:
                assert stop <= other_start or other_stop <= start


@given(peers=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_messages_of_a_peer_that_writes_for_itself_have_a_slot_each(peers: list[int]) -> None:
    (bucket,) = plan_buckets({(0, 0): [Slice(SHARD.box, "float32")]}, 1, 1 << 20)
    buckets = [RankBucket(bucket, peer, ()) for peer in peers]
    slots, shared_words = plan_slots(buckets, direct=[1])
    ours = [slot.start for slot, peer in zip(slots, peers, strict=True) if peer == 1]
    assert len(set(ours)) == len(ours)
    assert shared_words.get(1, 0) == len(ours) * count_direct_words(bucket)
    without, _ = plan_slots(buckets)
    others = [i for i, peer in enumerate(peers) if peer != 1]
    assert [slots[i] for i in others] == [without[i] for i in others]
