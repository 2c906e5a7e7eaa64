"""Serves one link's key-value store, which holds layouts, failures, stage requests and reports.

The controller serves it on a port of its own for as long as the link lives; its contents end with
the link. Only processes that got the link, and with it the store's random key, can connect.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.store.client import Client, LocalClient, RemoteClient, TorchStore
from mcore_rl.stream.store.server import StoreServer
from mcore_rl.stream.wire import (
    Action,
    Link,
    Report,
    StageRequest,
    decode_report,
    decode_stage_request,
    encode_report,
    encode_stage_request,
)

_DATA = b"D"
_ERROR = b"E"
"""First byte of a published value: either data or the error that kept a rank from publishing data.
"""
_FAILURE = "failure"
_FAILURE_POLL_S = 5.0
"""How often a wait for keys checks whether the link has failed."""
_NEVER_S = 3650 * 86400.0
"""Timeout of an engine that waits for stage requests: a training step takes as long as it takes."""


class LinkStore:
    """One process's client of a link's store; use each from one thread."""

    def __init__(self, client: Client, timeout_s: float, server: StoreServer | None) -> None:
        self.client = client
        self._timeout_s = timeout_s
        self._server = server

    @staticmethod
    def serve(host: str, timeout_s: float) -> "LinkStore":
        """Start a store with a random key on a free port of `host`, and at that address only.

        It ends with the object that is returned.
        """
        server = StoreServer(host)
        return LinkStore(LocalClient(server), timeout_s, server)

    @staticmethod
    def open(link: Link, *, waits_for_requests: bool = False) -> "LinkStore":
        """Connect to the store of `link`; with `waits_for_requests`, its reads never time out."""
        timeout_s = _NEVER_S if waits_for_requests else link.timeout_s
        client = RemoteClient(link.store_host, link.store_port, link.store_key)
        return LinkStore(client, timeout_s, None)

    @property
    def port(self) -> int:
        """The port at which this process serves the store."""
        return self._served.port

    @property
    def key(self) -> str:
        """The secret that a process must know to connect."""
        return self._served.key

    @property
    def _served(self) -> StoreServer:
        assert self._server is not None, "another process serves this store"
        return self._server

    @property
    def num_keys(self) -> int:
        return self.client.count()

    def for_torch(self) -> Any:
        """Return this store as one at which a torch process group can meet."""
        return TorchStore(self.client, self._timeout_s)

    def publish(self, topic: str, rank: int, data: bytes) -> None:
        """Publish this rank's `data` on `topic` to all ranks of the link."""
        self.client.set(f"{topic}/{rank}", _DATA + data)

    @contextmanager
    def errors_published(self, topic: str, rank: int) -> Iterator[None]:
        """Publish an error raised inside in place of this rank's data, so that no rank waits."""
        try:
            yield
        except Exception as error:
            self.client.set(f"{topic}/{rank}", _ERROR + str(error).encode())
            raise

    def collect(
        self,
        topic: str,
        ranks: Sequence[int],
        names: Sequence[str],
        waiting: str,
        deadline_s: float,
    ) -> list[bytes]:
        """Return what each of `ranks` published on `topic`, in order.

        Waits until time.monotonic() passes `deadline_s` or a rank of the link fails; `waiting` is
        the name of the rank that waits. Raises TransferError if a rank has not published by then,
        which names it by `names`, or if it published an error.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        began_s = time.monotonic()
        while not self.client.wait(keys, min(_FAILURE_POLL_S, deadline_s - time.monotonic())):
            failure = self.failure()
            if failure is None and time.monotonic() < deadline_s:
                continue
            missing = [
                names[rank]
                for rank, key in zip(ranks, keys, strict=True)
                if not self.client.check([key])
            ]
            waited_s = time.monotonic() - began_s
            message = f"{waiting} waited {waited_s:.1f} s for the {topic} of {', '.join(missing)}"
            raise TransferError(message + (f"; {failure}" if failure else ""), peer_lost=True)
        values = [self._get(key) for key in keys]
        for rank, value in zip(ranks, values, strict=True):
            if value[:1] == _ERROR:
                raise TransferError(f"{names[rank]} failed: {value[1:].decode()}", peer_lost=True)
        return [value[1:] for value in values]

    def _get(self, key: str) -> bytes:
        """Return a value that is set."""
        value = self.client.get(key)
        assert value is not None, f"{key} was deleted"
        return value

    def fail(self, message: str) -> str:
        """Mark the link as failed for all its ranks; return the first failure, which may be
        another's.

        Returns `message` if the store is gone.
        """
        try:
            return self.client.compare_set(_FAILURE, b"", message.encode()).decode()
        except RuntimeError:
            return message

    def failure(self) -> str | None:
        """Return the first failure that a rank reported, or None; a lost store is a failure."""
        try:
            message = self.client.get(_FAILURE)
            return None if message is None else message.decode()
        except RuntimeError as error:
            return f"the controller's store is gone ({error})"

    def put_stage_request(self, number: int, request: StageRequest) -> None:
        """Leave a request for the engine's ranks; requests are numbered from 0."""
        self.client.set(_request_key(number), encode_stage_request(request))

    def wait_stage_request(self, number: int) -> StageRequest:
        """Return request `number`, however long it takes to come; RuntimeError once the store is
        gone.

        Blocks every other use of this object.
        """
        key = _request_key(number)
        if not self.client.wait([key], self._timeout_s):
            raise TransferError(f"no stage request {number} within {self._timeout_s:g} s")
        return decode_stage_request(self._get(key))

    def drop_stage_request(self, number: int) -> None:
        self.client.delete(_request_key(number))

    def put_report(self, action: Action, rank: int, report: Report) -> None:
        self.client.set(_report_key(action, rank), encode_report(report))

    def take_report(self, action: Action, rank: int) -> Report | None:
        """Remove and return the report of a rank, or return None if there is none yet."""
        key = _report_key(action, rank)
        report = self.client.get(key)
        if report is None:
            return None
        self.client.delete(key)
        return decode_report(report)


def _request_key(number: int) -> str:
    return f"stage/{number}"


def _report_key(action: Action, rank: int) -> str:
    return f"report/{action}/{rank}"
