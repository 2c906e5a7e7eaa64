"""Channels: words that both ends see, counters, and how each end hears of the other."""

import time
from collections.abc import Iterator

import pytest
import torch

from mcore_rl.weight_sync.transports.shared_memory import (
    Channel,
    SegmentSpec,
    fetch_channels,
    serve_segments,
)
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import HOST, make_link, open_ends, run_ranks

SEGMENT = SegmentSpec(10, HOST)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """The sender's end and the receiver's."""
    _store, link = make_link(timeout_s=10)
    sender, receiver = open_ends(link)
    channels, channel = run_ranks(
        [
            lambda: serve_segments(sender, {1: SEGMENT}),
            lambda: fetch_channels(receiver, {0: SEGMENT}),
        ]
    )
    yield channels[1], channel[0]


def test_both_ends_see_words_and_counters(pair: tuple[Channel, Channel]) -> None:
    sender, receiver = pair
    assert not receiver.wait(1, 0.01)
    sender.words_W[:] = torch.arange(10)
    sender.advance()
    assert receiver.wait(1, 10) and not receiver.wait(2, 0.01)
    assert receiver.words_W.tolist() == [*range(10)]
    assert not sender.wait(1, 0.01)
    receiver.advance()
    assert sender.wait(1, 10)


def test_a_notice_of_a_message_that_was_seen_before_ends_no_wait(
    pair: tuple[Channel, Channel],
) -> None:
    sender, receiver = pair
    sender.advance()
    sender.advance()
    assert receiver.wait(2, 10)
    began_s = time.monotonic()
    assert not receiver.wait(3, 0.3)
    assert time.monotonic() - began_s > 0.25


def test_the_end_of_a_process_shows_at_once_but_after_what_it_wrote(
    pair: tuple[Channel, Channel],
) -> None:
    sender, receiver = pair
    sender.advance()
    sender.close()
    assert receiver.wait(1, 10)
    began_s = time.monotonic()
    with pytest.raises(ConnectionResetError):
        while not receiver.wait(2, 10):
            pass
    assert time.monotonic() - began_s < 5


def test_a_rank_that_does_not_come_is_named() -> None:
    _store, link = make_link(timeout_s=0.1)
    sender, receiver = open_ends(link)
    with pytest.raises(
        TransferError, match=r"trainer rank 0 waited in vain for rank 0 of engine engine-0"
    ):
        serve_segments(sender, {1: SEGMENT})
    with pytest.raises(TransferError, match="no shared memory from trainer rank 0"):
        fetch_channels(receiver, {0: SEGMENT})


def test_only_host_words_take_host_memory() -> None:
    on_gpu = SegmentSpec(1 << 20, torch.device("cuda", 0))
    assert on_gpu.host_bytes < SegmentSpec(1 << 20, HOST).host_bytes / 1000
