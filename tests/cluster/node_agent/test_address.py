"""A node's address: by interface, by its name, or by the way to another node."""

import socket

import pytest

from mcore_rl.cluster.node_agent.ray_node import find_interface, find_own_address


def test_an_interface_is_taken_by_name() -> None:
    assert find_own_address("lo", "unused", None) == "127.0.0.1"
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.7") == ""
    with pytest.raises(ValueError, match=r"launch.interface=ib7: .* has no such .* lo \(127.0.0.1"):
        find_own_address("ib7", "unused", None)


def test_a_name_of_this_machine_is_taken() -> None:
    assert find_own_address("", "127.0.0.9", None) == "127.0.0.9"
    assert find_own_address("", "localhost", "203.0.113.7") == "127.0.0.1"


def test_otherwise_the_way_to_a_peer_decides() -> None:
    assert find_own_address("", "no-such-node.invalid", "127.0.0.5") == "127.0.0.1"
    assert find_own_address("", "no-such-node.invalid", None) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        expected = probe.getsockname()[0]
    assert find_own_address("", "203.0.113.7", "192.0.2.1") == expected
    with pytest.raises(ValueError, match=r"neither this node's name 'a.invalid' nor its peer's"):
        find_own_address("", "a.invalid", "b.invalid")
