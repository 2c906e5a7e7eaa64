"""The clients of a store: over TCP, or in the process that serves it."""

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Protocol

from torch import distributed

from mcore_rl.weight_sync.store.messages import (
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    StoreMessageError,
    check_length,
    is_proof,
    make_nonce,
    make_proof,
    pack,
    unpack,
)
from mcore_rl.weight_sync.store.server import LONGEST_WAIT_S, StoreServer

_CONNECT_S = 30.0
_SLOW_S = 120.0
"""How late an answer may be: the server shares its process with other work."""


class StoreLostError(RuntimeError):
    """The store's server is gone, or refused the key."""


class Client(Protocol):
    """The calls of both kinds of clients; see `Values`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, all of which are set."""
        ...

    def list_missing(self, keys: Sequence[str]) -> list[str]: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def delete(self, key: str) -> bool: ...

    def count(self) -> int: ...

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait for up to `seconds`; return whether all of `keys` are set."""
        ...

    def fetch(self, key: str, seconds: float) -> bytes | None:
        """Return the value of `key` once the key is set; None if it is not set within `seconds`."""
        ...


class LocalClient:
    """The client in the process of `server`, which lives as long as this object."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        values = server.values
        self.set = values.set
        self.get = values.get
        self.get_all = values.get_all
        self.list_missing = values.list_missing
        self.check = values.check
        self.add = values.add
        self.compare_set = values.compare_set
        self.delete = values.delete
        self.count = values.count

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        present = threading.Event()
        waiter = self.server.values.when_present(keys, present.set)
        if waiter is None:
            return True
        try:
            return present.wait(max(0.0, seconds))
        finally:
            self.server.values.forget(waiter)

    def fetch(self, key: str, seconds: float) -> bytes | None:
        self.wait([key], seconds)
        return self.get(key)


class RemoteClient:
    """One connection to a store, made by the first call.

    Calls of several threads wait for one another. All calls raise StoreLostError once the server is
    gone.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = host, port
        self._where = f"{host}:{port}"
        self._key = key
        self._lock = threading.Lock()
        self._connected: socket.socket | None = None

    def set(self, key: str, value: bytes) -> None:
        self._ask(b"set", key.encode(), value)

    def get(self, key: str) -> bytes | None:
        answer = self._ask(b"get", key.encode())
        return answer[0] if answer else None

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(b"get_all", *_encode_keys(keys))

    def list_missing(self, keys: Sequence[str]) -> list[str]:
        return [key.decode() for key in self._ask(b"missing", *_encode_keys(keys))]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *_encode_keys(keys)) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key.encode(), str(amount).encode())[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask(b"compare_set", key.encode(), expected, desired)[0]

    def delete(self, key: str) -> bool:
        return self._ask(b"delete", key.encode()) == [b"1"]

    def count(self) -> int:
        return int(self._ask(b"count")[0])

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        encoded = _encode_keys(keys)
        while True:
            left_s = min(LONGEST_WAIT_S, max(0.0, deadline_s - time.monotonic()))
            if self._ask(b"wait", f"{left_s:.6f}".encode(), *encoded) == [b"1"]:
                return True
            if time.monotonic() >= deadline_s:
                return False

    def fetch(self, key: str, seconds: float) -> bytes | None:
        deadline_s = time.monotonic() + seconds
        while True:
            left_s = min(LONGEST_WAIT_S, max(0.0, deadline_s - time.monotonic()))
            answer = self._ask(b"fetch", f"{left_s:.6f}".encode(), key.encode())
            if answer:
                return answer[0]
            if time.monotonic() >= deadline_s:
                return None

    def _connect(self) -> socket.socket:
        try:
            connected = socket.create_connection(self._address, timeout=_CONNECT_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            server_nonce = self._read(connected, NONCE_BYTES)
            nonce = make_nonce()
            connected.sendall(nonce + make_proof(self._key, "client", server_nonce, nonce))
            answer = self._read(connected, PROOF_BYTES)
            if not is_proof(answer, self._key, "server", server_nonce, nonce):
                raise StoreLostError(f"the store at {self._where} does not know the link's key")
            connected.settimeout(LONGEST_WAIT_S + _SLOW_S)
        except OSError as error:
            raise StoreLostError(f"no store at {self._where}: {error}") from error
        return connected

    def _ask(self, *request: bytes) -> list[bytes]:
        message = pack(request)
        with self._lock:
            if self._connected is None:
                self._connected = self._connect()
            try:
                self._connected.sendall(message)
                (num_bytes,) = LENGTH.unpack(self._read(self._connected, LENGTH.size))
                check_length(num_bytes)
                return unpack(self._read(self._connected, num_bytes))
            except (OSError, StoreMessageError) as error:
                self._connected.close()  # It may still hold half an answer.
                raise StoreLostError(f"the store at {self._where}: {error}") from error

    def _read(self, connected: socket.socket, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = connected.recv(min(num_bytes - len(data), 1 << 20))
            if not part:
                raise StoreLostError(f"the store at {self._where} hung up")
            data += part
        return bytes(data)


class TorchStore(distributed.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Lets torch's process groups meet at a store; one per link and group, kept for good.

    A group calls its store from threads of its own. It keeps the C++ half of this object, and fails
    once the Python half is gone.
    """

    _kept: ClassVar[list["TorchStore"]] = []

    def __init__(self, client: Client, timeout_s: float) -> None:
        super().__init__()
        self._kept.append(self)
        self._client = client
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        self._client.set(key, _encode_value(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._client.get(key)
        assert value is not None, f"{key} was deleted"
        return value

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._client.check(keys)

    def compare_set(
        self, key: str, expected_value: bytes | str, desired_value: bytes | str
    ) -> bytes:
        return self._client.compare_set(
            key, _encode_value(expected_value), _encode_value(desired_value)
        )

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def num_keys(self) -> int:
        return self._client.count()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._client.wait(keys, seconds):
            raise distributed.DistStoreError(f"no {', '.join(keys)} within {seconds:g} s")

    def clone(self) -> "TorchStore":
        return self

    # The names under which torch's C++ code calls these two.
    deleteKey = delete_key
    getNumKeys = num_keys


def _encode_value(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _encode_keys(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]
