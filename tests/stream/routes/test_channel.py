"""Two processes of one machine meet: what both see, and how each hears of the other."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mcore_rl.stream.routes.channel import Channel, SegmentServer, SegmentSpec, fetch
from mcore_rl.stream.routes.transport import TransferError

NAMES = ("trainer rank 0", "rank 0 of engine engine-0")
ROOM = SegmentSpec(10, torch.device("cpu"))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The sender's, the receiver's."""
    until_s = time.monotonic() + 10
    doorstep = SegmentServer()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, doorstep.name, 1, ROOM, NAMES[0], until_s)
        ours = doorstep.serve({1: ROOM}, NAMES, NAMES[0], until_s)[1]
        yield ours, fetching.result()


def test_words_are_seen_and_counters_heard_by_both(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    assert not receiver.wait(1, 0.01)
    sender.words_W[:] = torch.arange(10)
    sender.advance()
    assert receiver.wait(1, 10) and not receiver.wait(2, 0.01)
    assert receiver.words_W.tolist() == [*range(10)]
    assert not sender.wait(1, 0.01)
    receiver.advance()
    assert sender.wait(1, 10)


def test_the_end_of_one_is_heard_at_once_but_not_before_what_it_wrote(
    ends: tuple[Channel, Channel],
) -> None:
    sender, receiver = ends
    sender.advance()
    sender.close()
    assert receiver.wait(1, 10)
    began_s = time.monotonic()
    with pytest.raises(ConnectionResetError):
        while not receiver.wait(2, 10):
            pass
    assert time.monotonic() - began_s < 5


def test_those_who_do_not_come_are_named() -> None:
    with pytest.raises(
        TransferError, match=r"trainer rank 0 waited in vain for rank 0 of engine engine-0"
    ):
        SegmentServer().serve({1: ROOM}, NAMES, NAMES[0], time.monotonic() + 0.05)
    with pytest.raises(TransferError, match="no shared memory from trainer rank 0"):
        fetch("mcore_rl-nobody", 1, ROOM, NAMES[0], time.monotonic() + 0.05)


def test_only_host_words_take_host_memory() -> None:
    on_gpu = SegmentSpec(1 << 20, torch.device("cuda", 0))
    assert on_gpu.host_bytes < SegmentSpec(1 << 20, torch.device("cpu")).host_bytes / 1000
