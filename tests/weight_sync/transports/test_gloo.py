"""Gloo between two ranks in threads: any memory, several messages, deadlines, failures and ends."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch

from mcore_rl.weight_sync.transports.gloo import GlooTransport, find_local_address
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import HOST, make_link, open_ends, run_ranks

Pair = tuple[GlooTransport, GlooTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The transports of the sending rank 0 and the receiving rank 1."""
    _store, link = make_link(timeout_s=20)
    ends = open_ends(link)
    sender, receiver = run_ranks([lambda end=end: GlooTransport(end) for end in ends])
    yield sender, receiver
    for transport in (sender, receiver):
        if hasattr(transport, "_group"):
            transport.close()


def soon() -> float:
    return time.monotonic() + 10


def no_failure() -> None:
    return None


def test_bytes_arrive_in_the_order_in_which_both_ends_start_them(pair: Pair) -> None:
    sender, receiver = pair
    assert sender.message(0, 1) is None
    assert sender.device(1) == HOST
    sent = [torch.full((1000 * (i + 1),), i, dtype=torch.uint8) for i in range(3)]
    received = [torch.zeros_like(message_u8) for message_u8 in sent]
    for i in range(3):
        receiver.recv(received[i], 0, f"bucket {i}")
        sender.send(sent[i], 1, f"bucket {i}")
    receiver.run(soon(), no_failure, pending=1)
    assert torch.equal(received[0], sent[0]) and torch.equal(received[1], sent[1])
    receiver.run(soon(), no_failure)
    sender.run(soon(), no_failure)
    assert torch.equal(received[2], sent[2])


def test_only_contiguous_bytes_can_be_sent(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="bucket 0: bytes must lie contiguous"):
        pair[0].send(torch.zeros(8, dtype=torch.uint8)[::2], 1, "bucket 0")


def test_a_message_that_does_not_come_is_named_at_the_deadline(pair: Pair) -> None:
    _, receiver = pair
    receiver.recv(torch.zeros(4, dtype=torch.uint8), 0, "bucket 0")
    with pytest.raises(
        TransferError,
        match=r"rank 0 of engine engine-0 waited 0.\d s for bucket 0 from trainer rank 0",
    ) as caught:
        receiver.run(time.monotonic() + 0.2, no_failure)
    assert caught.value.peer_lost


def test_a_failure_of_the_link_ends_a_wait(pair: Pair) -> None:
    _, receiver = pair
    receiver.recv(torch.zeros(4, dtype=torch.uint8), 0, "bucket 0")
    began_s = time.monotonic()
    with pytest.raises(TransferError, match=r"stopped waiting: trainer rank 1: no memory"):
        receiver.run(began_s + 20, lambda: "trainer rank 1: no memory")
    assert time.monotonic() - began_s < 5


def test_the_end_of_a_rank_is_heard_at_once(pair: Pair) -> None:
    sender, receiver = pair
    receiver.recv(torch.zeros(4, dtype=torch.uint8), 0, "bucket 0")
    sender.close()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="bucket 0 from trainer rank 0"):
        receiver.run(began_s + 20, no_failure)
    assert time.monotonic() - began_s < 5


def test_a_local_address_is_one_that_this_host_has() -> None:
    address = find_local_address("127.0.0.1", 9)
    assert address == "127.0.0.1"
    socket.create_server((address, 0)).close()
