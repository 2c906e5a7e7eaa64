"""Open memory: access is given once, grants name the places of each version, errors the peer."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.weight_sync.link_end import OpenMemory
from mcore_rl.weight_sync.transports.host.direct import WriteAccess, open_memory_to
from mcore_rl.weight_sync.transports.host.one_pass import Targets
from mcore_rl.weight_sync.transports.host.segment import Segment
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import make_link, open_ends

PAGE = 4096


def targets_at(*addresses: int) -> Targets:
    """A slice of 8 bytes at each address."""
    moves = [(address, 0, 0, 0, 1, 8) for address in addresses]
    return Targets(np.ones(len(moves), np.int64), np.array(moves, np.int64))


def no_failure() -> str | None:
    return None


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Pair:
    """A sender and a receiver with two segments of a page."""

    def __init__(self, *, opens: bool = True) -> None:
        self._store, link = make_link()
        sender, receiver = open_ends(link)
        self.segments = [Segment(PAGE), Segment(PAGE)]
        memory = OpenMemory(self.segments)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(WriteAccess.ask, sender, 1, memory.name)
            self.grants = open_memory_to(replace(receiver, memory=memory), {0: opens})
            self.given = asking.result()

    @property
    def access(self) -> WriteAccess:
        assert self.given is not None, "the receiver declined"
        return self.given


@pytest.fixture
def pair() -> Pair:
    return Pair()


def word_at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def test_what_is_written_to_a_grants_places_lies_in_the_receivers_segments(pair: Pair) -> None:
    first, second = pair.segments
    wanted = [first.address + 8, second.address, second.address + PAGE - 8]
    for version, number in ((1, 0), (2, 1), (3, 0)):
        pair.grants[0].grant(version, number, targets_at(*wanted[number:]))
        found = pair.access.wait(version, soon(), no_failure)
        assert found.counts.tolist() == [1] * (3 - number)
        for i, address in enumerate(found.moves[:, 0].tolist()):
            assert address not in wanted, "it is another mapping"
            word_at(address).value = 10 * version + i
        seen = [word_at(address).value for address in wanted[number:]]
        assert seen == [10 * version + i for i in range(3 - number)]


def test_a_receiver_can_decline() -> None:
    pair = Pair(opens=False)
    assert pair.given is None and pair.grants == {}


def test_the_places_of_a_set_travel_once(pair: Pair) -> None:
    wanted = targets_at(pair.segments[0].address)
    pair.grants[0].grant(1, 0, wanted)
    first = pair.access.wait(1, soon(), no_failure)
    pair.grants[0].grant(2, 0, wanted)
    assert pair.access.wait(2, soon(), no_failure) is first


def test_a_place_outside_the_segments_is_not_granted(pair: Pair) -> None:
    second = pair.segments[1]
    for address in (second.address + PAGE - 7, second.address - 1, 0):
        with pytest.raises(AssertionError, match="outside the shared memory"):
            pair.grants[0].grant(1, 0, targets_at(address))


def test_a_grant_of_another_version_is_refused(pair: Pair) -> None:
    pair.grants[0].grant(4, 0, targets_at(pair.segments[0].address))
    with pytest.raises(TransferError, match="engine-0 waits for version 4, not for version 5"):
        pair.access.wait(5, soon(), no_failure)


def test_a_wait_ends_at_the_deadline_with_the_link_or_with_the_peer(pair: Pair) -> None:
    waited = "trainer rank 0 waited .* for rank 0 of engine engine-0 to say where version 1 goes: "
    with pytest.raises(TransferError, match=waited + "the time is up"):
        pair.access.wait(1, soon(0.05), no_failure)
    with pytest.raises(TransferError, match=waited + "rank 3 failed"):
        pair.access.wait(1, soon(), lambda: "rank 3 failed")
    pair.grants[0].close()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match=waited + "the process is gone"):
        pair.access.wait(1, soon(), no_failure)
    assert time.monotonic() - began_s < 2


def test_ranks_that_do_not_meet_are_named_at_the_deadline() -> None:
    _store, link = make_link()
    sender, receiver = (replace(end, deadline_s=soon(0.1)) for end in open_ends(link))
    memory = OpenMemory([Segment(PAGE), Segment(PAGE)])
    with pytest.raises(TransferError, match="no memory of rank 0 of engine engine-0: "):
        WriteAccess.ask(sender, 1, memory.name)
    lonely = OpenMemory([Segment(PAGE), Segment(PAGE)])
    with pytest.raises(TransferError, match="in vain for trainer rank 0 to ask for its memory"):
        open_memory_to(replace(receiver, memory=lonely), {0: True})
