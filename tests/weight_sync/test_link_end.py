"""An end of a link: which rank it is, by when all meet, and whom it waited for."""

import time

import pytest

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import HOST, make_link, open_ends


def test_ranks_are_counted_over_the_link_and_over_their_side() -> None:
    _store, link = make_link(num_senders=2, num_receivers=2)
    ends = open_ends(link)
    assert [end.is_sender for end in ends] == [True, True, False, False]
    assert [end.side_rank for end in ends] == [0, 1, 0, 1]
    assert [end.name for end in ends] == list(link.names)


def test_all_ranks_have_the_links_timeout_to_meet() -> None:
    _store, link = make_link(timeout_s=7.0)
    end = LinkEnd.open(link, 0, HOST)
    assert 6.0 < end.deadline_s - time.monotonic() <= 7.0


def test_data_is_collected_from_all_ranks_unless_some_are_named() -> None:
    _store, link = make_link(num_senders=2, timeout_s=0.2)
    ends = open_ends(link)
    for end in ends[:2]:
        end.store.publish("plan", end.rank, end.name.encode())
    assert ends[2].collect("plan", [1]) == [b"trainer rank 1"]
    with pytest.raises(TransferError, match=r"the plan of rank 0 of engine engine-0"):
        ends[0].collect("plan")


def test_the_error_of_a_wait_says_who_waited_how_long_for_what() -> None:
    _store, link = make_link()
    error = open_ends(link)[1].make_lost_error("bucket 3", "the time is up", time.monotonic() - 2.5)
    assert str(error) == "rank 0 of engine engine-0 waited 2.5 s for bucket 3: the time is up"
    assert error.peer_lost
