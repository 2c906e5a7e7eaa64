"""Which addresses are this machine's own, and the interface that collectives of a run there use."""

import os
from pathlib import Path

import pytest

from mcore_rl.process.network import (
    find_loopback_interfaces,
    is_loopback,
    refuse_open_door,
    restrict_zmq_peers,
    stay_on_loopback,
    url_of,
)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("", False),
        ("node3", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_collectives_stay_on_the_loopback_interface_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [name] = set(find_loopback_interfaces().values())
    assert Path("/sys/class/net", name).exists()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    stay_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    assert os.environ["NCCL_SOCKET_IFNAME"] == name
    monkeypatch.undo()
    os.environ.pop("NCCL_SOCKET_IFNAME", None)


def test_zmq_sockets_of_an_engine_take_messages_of_its_machines_only() -> None:
    allowed = "SGLANG_ZMQ_ALLOWED_PEERS"
    assert restrict_zmq_peers("127.0.0.1", ()) == {allowed: "127.0.0.1"}
    assert restrict_zmq_peers("10.0.0.2", ("10.0.0.1", "10.0.0.2")) == {
        allowed: "10.0.0.1,10.0.0.2,127.0.0.1",
        "SGLANG_ZMQ_SOURCE_IP": "10.0.0.2",
    }
    assert restrict_zmq_peers("127.0.0.1", ("127.0.0.1", "127.0.0.1")) == {allowed: "127.0.0.1"}
    assert restrict_zmq_peers("node3", ()) == {}


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")]
)
def test_an_ipv6_address_stands_in_brackets(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def test_a_server_without_a_key_is_for_this_machine_alone() -> None:
    refuse_open_door("127.0.0.1", "search")
    with pytest.raises(ValueError, match=r"--host=0\.0\.0\.0: whoever reaches it could search"):
        refuse_open_door("0.0.0.0", "search")
