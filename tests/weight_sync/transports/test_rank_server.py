"""Ranks come once each, in any order; those that stay away and those not invited are named."""

import socket

import pytest

from mcore_rl.weight_sync.link_end import LinkEnd, RankServer, connect
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import make_link, open_ends


def come(end: LinkEnd, server: RankServer) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    connect(peer, end, server.name)
    return peer


def test_ranks_are_served_as_they_come_and_then_nobody() -> None:
    _store, link = make_link(num_receivers=2)
    sender, first, second = open_ends(link)
    server = RankServer()
    with come(second, server) as later, come(first, server) as earlier:
        for rank, peer in server.accept(sender, {1, 2}, "meet"):
            with peer:
                peer.sendall(bytes([rank]))
        assert [later.recv(1), earlier.recv(1)] == [b"\2", b"\1"]
    with pytest.raises(ConnectionRefusedError):
        come(first, server)


def test_a_rank_that_stays_away_is_named() -> None:
    _store, link = make_link(num_receivers=2, timeout_s=0.5)
    sender, first, _ = open_ends(link)
    server = RankServer()
    wanted = r"trainer rank 0 waited in vain for rank 1 of engine engine-0 .*to meet"
    with come(first, server), pytest.raises(TransferError, match=wanted) as caught:
        list(server.accept(sender, {1, 2}, "meet"))
    assert caught.value.peer_lost


def test_a_rank_that_is_not_invited_is_refused() -> None:
    _store, link = make_link(num_receivers=2)
    sender, first, _ = open_ends(link)
    server = RankServer()
    with come(first, server), pytest.raises(AssertionError, match="rank 1 came uninvited to meet"):
        list(server.accept(sender, {2}, "meet"))
