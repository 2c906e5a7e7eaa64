"""Connections between nodes: reached ones, closed ports, and addresses that others have, too."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_rl.tools.doctor.machine.clock import measure_offset
from mcore_rl.tools.doctor.machine.traffic import (
    QUESTIONS,
    PeerAddress,
    listen,
    reach,
    reach_all,
)

HOST = "127.0.0.1"


def test_a_peer_tells_its_time() -> None:
    with listen(HOST, "t", 1, lambda: time.time() + 40) as peer:
        own, answer = reach_all([None, peer], "t")
    assert own.error == answer.error == ""
    assert (len(own.samples), len(answer.samples)) == (0, QUESTIONS)
    offset = measure_offset(answer.samples)
    assert offset.seconds == pytest.approx(40, abs=0.5)
    assert offset.uncertainty_s < 0.5


@pytest.mark.parametrize(("token", "rank"), [("other", 1), ("t", 2)])
def test_an_address_that_leads_elsewhere_is_not_the_peers(token: str, rank: int) -> None:
    with listen(HOST, "t", 1) as peer:
        answer = reach(peer, token, rank, time.time)
    where = f"{HOST} port {peer.port}"
    assert answer.error == f"{where} leads to another machine, which has the same address"


def test_a_closed_port_and_another_program_are_named() -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        peer = PeerAddress(HOST, bound.getsockname()[1])
        answer = reach(peer, "t", 1, time.time)
        assert answer.error == f"{HOST} port {peer.port}: [Errno 111] Connection refused"
        bound.listen()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(reach, peer, "t", 1, time.time)
            connection, _ = bound.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            assert asked.result(10).error == f"{HOST} port {peer.port}: another program answers"
            connection.close()
