"""Serves a store at one address, in a thread, to clients that prove to know its key."""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import weakref

from mcore_rl.weight_sync.store.messages import (
    LENGTH,
    NONCE_BYTES,
    PROOF_BYTES,
    StoreMessageError,
    check_length,
    is_proof,
    make_nonce,
    pack,
    proof,
    unpack,
)
from mcore_rl.weight_sync.store.values import Values

_log = logging.getLogger(__name__)
_HANDSHAKE_S = 10.0
"""A client that has not proved within this time to know the key is hung up on."""
_MAX_STRANGERS = 1024
"""Connections that have not proved it yet; further ones are closed at once."""
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
        # The thread must not hold this object, whose end ends it.
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
            pass  # the server stops; asyncio logs a traceback for a task that ends by it
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
                writer.write(proof(self._key, "server", nonce, client_nonce))
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
                    return [key.encode() for key in values.missing([key.decode() for key in keys])]
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
