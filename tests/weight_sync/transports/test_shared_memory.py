"""Shared memory between two ranks in threads: messages in place, flow control, and ends that go."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.transports.shared_memory import (
    SegmentSpec,
    SharedMemoryTransport,
    fetch_channels,
    serve_segments,
)
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import HOST, make_link, open_ends, run_ranks

SEGMENT = SegmentSpec(8, HOST)
Pair = tuple[SharedMemoryTransport, SharedMemoryTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The transports of the sending rank 0 and the receiving rank 1."""
    _store, link = make_link(timeout_s=10)
    sender, receiver = open_ends(link)
    sending, receiving = run_ranks(
        [
            lambda: serve_segments(sender, {1: SEGMENT}),
            lambda: fetch_channels(receiver, {0: SEGMENT}),
        ]
    )
    transports = (
        SharedMemoryTransport(sender, sending, DeviceStream(HOST)),
        SharedMemoryTransport(receiver, receiving, DeviceStream(HOST)),
    )
    yield transports
    for transport in transports:
        transport.close()


def half(transport: SharedMemoryTransport, peer: int, index: int) -> Tensor:
    """One of two slots of the memory shared with `peer`, as bytes."""
    return transport.memory(peer)[4 * index : 4 * index + 4].view(torch.uint8)


def soon() -> float:
    return time.monotonic() + 5


def no_failure() -> None:
    return None


def test_both_ends_see_the_same_words_on_the_host(pair: Pair) -> None:
    sender, receiver = pair
    sender.memory(1)[:] = torch.arange(8)
    assert receiver.memory(0).tolist() == [*range(8)]
    assert sender.device(1) == receiver.device(0) == HOST


def test_a_sent_message_is_unfinished_until_the_receiver_runs_again(pair: Pair) -> None:
    sender, receiver = pair
    half(sender, 1, 0)[:] = 7
    sender.send(half(sender, 1, 0), 1, "bucket 0")
    receiver.recv(half(receiver, 0, 0), 0, "bucket 0")
    receiver.run(soon(), no_failure)
    assert half(receiver, 0, 0).tolist() == [7] * 32
    with pytest.raises(
        TransferError,
        match=r"trainer rank 0 waited .* for rank 0 of engine engine-0 to take bucket 0",
    ):
        sender.run(time.monotonic() + 0.05, no_failure)
    receiver.run(soon(), no_failure)
    sender.run(soon(), no_failure)


def test_run_waits_for_the_oldest_messages_and_leaves_as_many_as_may_be_pending(
    pair: Pair,
) -> None:
    sender, receiver = pair
    for index in range(2):
        receiver.recv(half(receiver, 0, index), 0, f"bucket {index}")
    sender.send(half(sender, 1, 0), 1, "bucket 0")
    receiver.run(soon(), no_failure, pending=1)
    with pytest.raises(TransferError, match=r"for bucket 1 from trainer rank 0: the time is up"):
        receiver.run(time.monotonic() + 0.05, no_failure)


def test_the_end_of_a_rank_is_heard_at_once(pair: Pair) -> None:
    sender, receiver = pair
    receiver.recv(half(receiver, 0, 0), 0, "bucket 0")
    sender.close()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="bucket 0 from trainer rank 0: the process is gone"):
        receiver.run(began_s + 20, no_failure)
    assert time.monotonic() - began_s < 5


def test_a_failure_of_the_link_ends_a_wait(pair: Pair) -> None:
    _, receiver = pair
    receiver.recv(half(receiver, 0, 0), 0, "bucket 0")
    with pytest.raises(TransferError, match="trainer rank 1: no memory") as caught:
        receiver.run(time.monotonic() + 20, lambda: "trainer rank 1: no memory")
    assert caught.value.peer_lost
