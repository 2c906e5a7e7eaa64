"""A free port is one that a server and its derived ports can bind, outside the ephemeral range."""

import socket
from pathlib import Path

import pytest

from mcore_rl.process import ports
from mcore_rl.process.ports import find_free_port


def test_a_free_port_can_be_bound_and_is_never_an_outgoing_one() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = find_free_port("127.0.0.1")
    assert 20000 <= port < int(first)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


@pytest.mark.parametrize("derived", [0, 6, 13, 233, 246])
def test_a_port_is_not_free_if_a_derived_one_is_taken(
    derived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = find_free_port("127.0.0.1")
    monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda *_: [port])
    assert find_free_port("127.0.0.1") == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + derived))
        with pytest.raises(RuntimeError, match="no free port between 20000 and"):
            find_free_port("127.0.0.1")
