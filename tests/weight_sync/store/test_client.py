"""Both kinds of clients do the same; a torch process group meets at either."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread, Timer
from typing import Any

import pytest
import torch
from torch import distributed

from mcore_rl.weight_sync.store import client as client_module
from mcore_rl.weight_sync.store.client import (
    Client,
    LocalClient,
    RemoteClient,
    StoreLostError,
    TorchStore,
)
from mcore_rl.weight_sync.store.messages import MAX_MESSAGE_BYTES, NONCE_BYTES, StoreMessageError
from mcore_rl.weight_sync.store.server import StoreServer

Make = Callable[[StoreServer], Client]


def remote(server: StoreServer) -> Client:
    return RemoteClient("127.0.0.1", server.port, server.key)


@pytest.mark.parametrize("make", [LocalClient, remote])
def test_a_client_does_what_values_do(make: Make) -> None:
    server = StoreServer("127.0.0.1")
    client = make(server)
    assert client.get("a") is None and not client.check(["a"]) and client.check([])
    client.set("a", b"")
    client.set("ä", b"\0\xff" * 100_000)
    assert client.get("a") == b"" and client.get("ä") == b"\0\xff" * 100_000
    assert client.check(["a", "ä"]) and client.count() == 2
    assert client.add("n", 5) == 5 and client.add("n", -2) == 3
    assert client.compare_set("f", b"", b"first") == b"first"
    assert client.compare_set("f", b"", b"second") == b"first"
    assert client.delete("f") and not client.delete("f")
    assert server.values.get("n") == b"3"


@pytest.mark.parametrize("make", [LocalClient, remote])
def test_a_fetch_returns_the_value_once_it_is_set(make: Make) -> None:
    server = StoreServer("127.0.0.1")
    client = make(server)
    late = Timer(0.2, make(server).set, ("a", b"value"))
    late.start()
    began_s = time.monotonic()
    assert client.fetch("a", 30.0) == b"value"
    assert 0.1 < time.monotonic() - began_s < 5.0
    assert client.fetch("a", 0.0) == b"value" and client.fetch("b", 0.1) is None
    late.join()


@pytest.mark.parametrize("make", [LocalClient, remote])
def test_waits_end_with_the_last_key_or_in_time(make: Make) -> None:
    server = StoreServer("127.0.0.1")
    client = make(server)
    client.set("a", b"")
    late = Timer(0.2, make(server).set, ("b", b""))
    late.start()
    began_s = time.monotonic()
    assert client.wait(["a", "b"], 30.0)
    assert 0.1 < time.monotonic() - began_s < 5.0
    assert client.wait([], 0.0) and not client.wait(["c"], 0.0)
    assert client.list_missing(["c", "a", "d"]) == ["c", "d"]
    assert client.get_all(["b", "a"]) == [b"", b""]
    began_s = time.monotonic()
    assert not client.wait(["c"], 0.2)
    assert time.monotonic() - began_s >= 0.2
    assert not server.values._waiters


def test_long_waits_are_made_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LONGEST_WAIT_S", 0.05)
    server = StoreServer("127.0.0.1")
    late = Timer(0.3, server.values.set, ("a", b""))
    late.start()
    assert remote(server).wait(["a"], 30.0)


def test_a_client_refuses_a_server_that_does_not_know_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"n" * NONCE_BYTES + b"p" * 64)
            connection.recv(1024)

        pretending = Thread(target=pretend)
        pretending.start()
        with pytest.raises(StoreLostError, match="does not know the link's key"):
            RemoteClient("127.0.0.1", port, "key").count()
        pretending.join()


def test_a_wrong_key_is_told() -> None:
    server = StoreServer("127.0.0.1")
    with pytest.raises(StoreLostError, match=f"127.0.0.1:{server.port}"):
        RemoteClient("127.0.0.1", server.port, "not the key").count()


def test_a_message_that_is_too_long_is_not_sent() -> None:
    server = StoreServer("127.0.0.1")
    client = remote(server)
    with pytest.raises(StoreMessageError, match="is longer than"):
        client.set("a", bytes(MAX_MESSAGE_BYTES))
    assert client.count() == 0


@pytest.mark.parametrize("make", [LocalClient, remote])
def test_a_torch_group_meets_at_a_store(make: Make) -> None:
    server = StoreServer("127.0.0.1")
    received: dict[int, Any] = {}
    group_type: Any = distributed.ProcessGroupGloo

    def join(rank: int) -> None:
        options = group_type._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [group_type.create_device(hostname="127.0.0.1", lazy_init=False)]
        prefix: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        group = group_type(prefix("p", TorchStore(make(server), 20.0)), rank, 2, options)
        tensor = torch.full((3,), float(rank))
        verb = group.recv if rank else group.send
        verb([tensor], 1 - rank, 0).wait()
        received[rank] = tensor.tolist()

    ranks = [Thread(target=join, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert received == {0: [0.0] * 3, 1: [0.0] * 3}


def test_torchs_own_calls_reach_the_store() -> None:
    server = StoreServer("127.0.0.1")
    own = TorchStore(LocalClient(server), 0.1)
    prefix: Any = distributed.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    store = prefix("p", own)
    store.set("a", "1")
    assert store.get("a") == b"1" and server.values.get("p/a") == b"1"
    assert store.add("n", 2) == 2 and store.check(["n"]) and store.num_keys() == 2
    assert store.compare_set("c", "", "x") == b"x"
    assert store.delete_key("c")
    store.wait(["a"], timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"no p/b within 0\.1 s"):
        store.get("b")
    assert own.clone() is own
