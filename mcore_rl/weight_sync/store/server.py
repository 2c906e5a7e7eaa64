"""Serves a store of keys and values at one address, to clients that prove to know its key.

The values are thread-safe. A waiter for keys is called once all of the keys are set.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

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


class _Waiter:
    def __init__(self, missing: set[str], on_present: Callable[[], None]) -> None:
        self.missing = missing
        self.on_present = on_present


class Values:
    """A dictionary in memory.

    `set`, `get`, `add`, `compare_set` and the like do the same as in torch's stores.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[_Waiter]] = defaultdict(list)

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            done = self._put(key, value)
        _call_all(done)

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Set many keys."""
        done = []
        with self._lock:
            for key, value in values.items():
                done += self._put(key, value)
        _call_all(done)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if the key is not set."""
        with self._lock:
            return self._values.get(key)

    def get_all(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of `keys`, in order; KeyError if one is not set."""
        with self._lock:
            return [self._values[key] for key in keys]

    def take_all(self, keys: Iterable[str]) -> list[bytes]:
        """Remove `keys` and return their values, in order; KeyError if one is not set."""
        with self._lock:
            return [self._values.pop(key) for key in keys]

    def list_missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that are not set."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of `keys` are set."""
        return not self.list_missing(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, at first 0; return the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            done = self._put(key, str(total).encode())
        _call_all(done)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the value to `desired` if it is `expected`, or if neither exists; return the value.

        Like torch, return `expected` for a key that is not set, unless that is empty.
        """
        with self._lock:
            present = self._values.get(key)
            if present is None and expected:
                return expected
            if present is not None and present != expected:
                return present
            done = self._put(key, desired)
        _call_all(done)
        return desired

    def delete(self, key: str) -> bool:
        """Return whether the key was set."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        with self._lock:
            return len(self._values)

    def when_present(self, keys: Sequence[str], on_present: Callable[[], None]) -> _Waiter | None:
        """Call `on_present` once all of `keys` are set: at once, or in the thread that sets them.

        Returns the waiter, which `forget` takes, or None if `on_present` was called already.
        """
        with self._lock:
            missing = {key for key in keys if key not in self._values}
            if missing:
                waiter = _Waiter(missing, on_present)
                for key in missing:
                    self._waiters[key].append(waiter)
                return waiter
        on_present()
        return None

    def forget(self, waiter: _Waiter) -> None:
        """Drop a waiter."""
        with self._lock:
            for key in waiter.missing:
                waiters = self._waiters.get(key, [])
                if waiter in waiters:
                    waiters.remove(waiter)
                if not waiters:
                    self._waiters.pop(key, None)

    def _put(self, key: str, value: bytes) -> list[_Waiter]:
        """Set the value; return the waiters whose keys are now all set."""
        self._values[key] = value
        waiters = self._waiters.pop(key, [])
        for waiter in waiters:
            waiter.missing.discard(key)
        return [waiter for waiter in waiters if not waiter.missing]


def _call_all(waiters: Sequence[_Waiter]) -> None:
    for waiter in waiters:
        waiter.on_present()


_log = logging.getLogger(__name__)
_HANDSHAKE_S = 10.0
"""The server hangs up on a client that has not proved within this time to know the key."""
_MAX_STRANGERS = 1024
"""Connections without a proof yet; further ones are closed at once."""
LONGEST_WAIT_S = 5.0
"""A client that waits longer asks again, so nothing of a lost client stays here."""
_STOP_S = 5.0


class StoreServer:
    """A store that lives as long as this object; `values` are its contents in this process."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`, and at that address only."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = listener.getsockname()[1]
        self.key = secrets.token_hex(32)
        self.values = Values()
        # The thread must not hold this object, because the object's end ends the thread.
        serving = _Serving(listener, self.key, self.values)
        self._close = weakref.finalize(self, serving.stop)

    def close(self) -> None:
        """Hang up on all clients."""
        self._close()


class _Serving:
    def __init__(self, listener: socket.socket, key: str, values: Values) -> None:
        self._key = key
        self._values = values
        self._num_strangers = 0
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="link-store", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._talk, sock=listener)
        await self._stopping.wait()
        server.close()
        # Leaving cancels the clients' tasks, which closes their connections.

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await self._is_friend(reader, writer):
                peer = writer.get_extra_info("peername")
                _log.warning("refused %s, which does not know the store's key", peer)
                return
            while True:
                (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                check_length(num_bytes)
                request = unpack(await reader.readexactly(num_bytes))
                writer.write(pack(await self._answer(request)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        except asyncio.CancelledError:
            pass  # The server stops; asyncio would log a traceback of the canceled task.
        except StoreMessageError as error:
            _log.warning("hung up on a client: %s", error)
        finally:
            writer.close()

    async def _is_friend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self._num_strangers >= _MAX_STRANGERS:
            return False
        self._num_strangers += 1
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                nonce = make_nonce()
                writer.write(nonce)
                answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
                client_nonce = answer[:NONCE_BYTES]
                if not is_proof(answer[NONCE_BYTES:], self._key, "client", nonce, client_nonce):
                    return False
                writer.write(make_proof(self._key, "server", nonce, client_nonce))
                return True
        except (asyncio.IncompleteReadError, TimeoutError):
            return False
        finally:
            self._num_strangers -= 1

    async def _answer(self, request: list[bytes]) -> list[bytes]:
        """Return the fields of the answer; StoreMessageError if the request makes no sense."""
        values = self._values
        try:
            match request:
                case [b"set", key, value]:
                    values.set(key.decode(), value)
                    return []
                case [b"get", key]:
                    value = values.get(key.decode())
                    return [] if value is None else [value]
                case [b"get_all", *keys]:
                    return values.get_all([key.decode() for key in keys])
                case [b"missing", *keys]:
                    missing = values.list_missing(key.decode() for key in keys)
                    return [key.encode() for key in missing]
                case [b"fetch", seconds, key]:
                    await self._wait(float(seconds), [key.decode()])
                    value = values.get(key.decode())
                    return [] if value is None else [value]
                case [b"check", *keys]:
                    return [b"1" if values.check([key.decode() for key in keys]) else b"0"]
                case [b"add", key, amount]:
                    return [str(values.add(key.decode(), int(amount))).encode()]
                case [b"compare_set", key, expected, desired]:
                    return [values.compare_set(key.decode(), expected, desired)]
                case [b"delete", key]:
                    return [b"1" if values.delete(key.decode()) else b"0"]
                case [b"count"]:
                    return [str(values.count()).encode()]
                case [b"wait", seconds, *keys]:
                    is_there = await self._wait(float(seconds), [key.decode() for key in keys])
                    return [b"1" if is_there else b"0"]
        except (ValueError, KeyError) as error:
            raise StoreMessageError(f"{request[0]!r}: {error}") from error
        raise StoreMessageError(f"no such request: {request[:1]!r} of {len(request)} fields")

    async def _wait(self, seconds: float, keys: list[str]) -> bool:
        present = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                self._loop.call_soon_threadsafe(present.set)

        waiter = self._values.when_present(keys, wake)
        if waiter is None:
            return True
        try:
            async with asyncio.timeout(min(seconds, LONGEST_WAIT_S)):
                await present.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._values.forget(waiter)
