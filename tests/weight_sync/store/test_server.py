"""A server of a store and clients that do not know its key or send nonsense."""

import gc
import hashlib
import logging
import socket
import threading
import time

import psutil
import pytest

from mcore_rl.weight_sync.store import server as server_module
from mcore_rl.weight_sync.store.client import RemoteClient, StoreLostError
from mcore_rl.weight_sync.store.messages import LENGTH, NONCE_BYTES, PROOF_BYTES, make_proof, pack
from mcore_rl.weight_sync.store.server import StoreServer


@pytest.fixture
def server() -> StoreServer:
    return StoreServer("127.0.0.1")


def connect(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def befriend(server: StoreServer) -> socket.socket:
    """A connection after the handshake."""
    client = connect(server)
    nonce = client.recv(NONCE_BYTES)
    own = b"c" * NONCE_BYTES
    client.sendall(own + make_proof(server.key, "client", nonce, own))
    assert client.recv(PROOF_BYTES) == make_proof(server.key, "server", nonce, own)
    return client


def is_hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_listens_at_its_address_only(server: StoreServer) -> None:
    [listening] = [
        c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == server.port
    ]
    assert listening == "127.0.0.1"


def test_keys_are_random_and_long(server: StoreServer) -> None:
    assert len(server.key) == 64 and server.key != StoreServer("127.0.0.1").key


@pytest.mark.parametrize(
    "answer",
    [
        b"\0" * (NONCE_BYTES + PROOF_BYTES),
        b"\0" * NONCE_BYTES + hashlib.sha256(b"guess").digest(),
        pack([b"set", b"failure", b"x"]) + b"\0" * 64,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b" " * 64,
    ],
)
def test_who_does_not_know_the_key_is_hung_up_on_and_changes_nothing(
    server: StoreServer, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.values.set("kept", b"as it is")
    with caplog.at_level(logging.WARNING):
        client = connect(server)
        assert len(client.recv(NONCE_BYTES)) == NONCE_BYTES
        client.sendall(answer)
        assert is_hung_up(client)
    assert "refused ('127.0.0.1'," in caplog.text and server.key not in caplog.text
    assert server.values.count() == 1 and server.values.get("kept") == b"as it is"
    assert RemoteClient("127.0.0.1", server.port, server.key).get("kept") == b"as it is"


def test_the_proof_of_another_connection_does_not_help(server: StoreServer) -> None:
    first, second = connect(server), connect(server)
    nonce, own = first.recv(NONCE_BYTES), b"c" * NONCE_BYTES
    second.recv(NONCE_BYTES)
    second.sendall(own + make_proof(server.key, "client", nonce, own))
    assert is_hung_up(second)


def test_silent_strangers_are_hung_up_on_and_bounded(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_S", 0.5)
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 2)
    silent = [connect(server) for _ in range(2)]
    for client in silent:
        client.recv(NONCE_BYTES)
    began_s = time.monotonic()
    assert is_hung_up(connect(server))
    assert time.monotonic() - began_s < 0.4
    assert all(map(is_hung_up, silent))
    RemoteClient("127.0.0.1", server.port, server.key).set("a", b"")


@pytest.mark.parametrize(
    "message",
    [
        LENGTH.pack(0xFFFFFFFF),
        LENGTH.pack(6) + b"\0\0\0\x09ab",
        pack([]),
        pack([b"eval", b"1"]),
        pack([b"set", b"a"]),
        pack([b"add", b"a", b"much"]),
        pack([b"get", b"\xff"]),
        pack([b"wait", b"soon", b"a"]),
    ],
)
def test_nonsense_ends_its_own_connection_only(server: StoreServer, message: bytes) -> None:
    client = befriend(server)
    client.sendall(message)
    assert is_hung_up(client)
    assert server.values.count() == 0
    other = befriend(server)
    other.sendall(pack([b"count"]))
    assert other.recv(64) == pack([b"0"])


def test_a_client_that_hangs_up_while_it_waits_leaves_nothing(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LONGEST_WAIT_S", 0.2)
    client = befriend(server)
    client.sendall(pack([b"wait", b"1e9", b"never"]))
    client.close()
    deadline_s = time.monotonic() + 10
    while not server.values._waiters:
        assert time.monotonic() < deadline_s
    while server.values._waiters:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_ends_with_its_object() -> None:
    before = set(threading.enumerate())
    server = StoreServer("127.0.0.1")
    [serving] = [t for t in set(threading.enumerate()) - before if t.name == "link-store"]
    client = RemoteClient("127.0.0.1", server.port, server.key)
    client.set("a", b"")
    port, key = server.port, server.key
    del server
    gc.collect()
    assert not serving.is_alive()
    with pytest.raises(StoreLostError, match=f"the store at 127.0.0.1:{port}"):
        client.get("a")
    with pytest.raises(StoreLostError, match=f"no store at 127.0.0.1:{port}: .*refused"):
        RemoteClient("127.0.0.1", port, key).count()


def test_closing_twice_does_no_harm() -> None:
    server = StoreServer("127.0.0.1")
    server.close()
    server.close()
