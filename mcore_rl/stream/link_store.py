"""Serves one link's key-value store, which holds layouts, failures, stage requests and reports.

The controller serves it on a port of its own for as long as the link lives; its keys end with the
link.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import distributed

from mcore_rl.stream.routes.transport import TransferError
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

TcpStore: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]

_DATA = b"D"
_ERROR = b"E"
"""First byte of a published value: either data or the error that kept a rank from publishing data.
"""
_FAILURE = "failure"
_FAILURE_POLL_S = 5.0
"""How often a wait for keys checks whether the link has failed. torch logs a warning at each check.
"""
_NEVER = timedelta(days=3650)
"""Timeout of an engine that waits for stage requests: a training step takes as long as it takes."""


class LinkStore:
    """One process's client of a link's store; use each from one thread."""

    def __init__(self, tcp_store: Any) -> None:
        self.tcp_store = tcp_store

    @staticmethod
    def serve(host: str, timeout_s: float) -> "LinkStore":
        """Start a store on a free port of `host`, reachable at that address only."""
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = TcpStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        return LinkStore(store)

    @staticmethod
    def open(link: Link, *, waits_for_requests: bool = False) -> "LinkStore":
        """Connect to the store of `link`; with `waits_for_requests`, its reads never time out."""
        timeout = _NEVER if waits_for_requests else timedelta(seconds=link.timeout_s)
        return LinkStore(
            TcpStore(link.store_host, link.store_port, is_master=False, timeout=timeout)
        )

    @property
    def port(self) -> int:
        return self.tcp_store.port

    @property
    def num_keys(self) -> int:
        return self.tcp_store.num_keys()

    def publish(self, topic: str, rank: int, data: bytes) -> None:
        """Publish this rank's `data` on `topic` to all ranks of the link."""
        self.tcp_store.set(f"{topic}/{rank}", _DATA + data)

    @contextmanager
    def errors_published(self, topic: str, rank: int) -> Iterator[None]:
        """Publish an error raised inside in place of this rank's data, so that no rank waits."""
        try:
            yield
        except Exception as error:
            self.tcp_store.set(f"{topic}/{rank}", _ERROR + str(error).encode())
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
        while not self._wait(keys, min(_FAILURE_POLL_S, deadline_s - time.monotonic())):
            failure = self.failure()
            if failure is None and time.monotonic() < deadline_s:
                continue
            missing = [
                names[rank]
                for rank, key in zip(ranks, keys, strict=True)
                if not self.tcp_store.check([key])
            ]
            waited_s = time.monotonic() - began_s
            message = f"{waiting} waited {waited_s:.1f} s for the {topic} of {', '.join(missing)}"
            raise TransferError(message + (f"; {failure}" if failure else ""), peer_lost=True)
        values = self.tcp_store.multi_get(keys)
        for rank, value in zip(ranks, values, strict=True):
            if value[:1] == _ERROR:
                raise TransferError(f"{names[rank]} failed: {value[1:].decode()}", peer_lost=True)
        return [value[1:] for value in values]

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all `keys` are set within `seconds`."""
        try:
            self.tcp_store.wait(keys, timedelta(seconds=max(0.001, seconds)))
        except distributed.DistStoreError:
            return False
        return True

    def fail(self, message: str) -> str:
        """Mark the link as failed for all its ranks; return the first failure, which may be
        another's.

        Returns `message` if the store is gone.
        """
        try:
            return self.tcp_store.compare_set(_FAILURE, "", message).decode()
        except RuntimeError:
            return message

    def failure(self) -> str | None:
        """Return the first failure that a rank reported, or None; a lost store is a failure."""
        try:
            if not self.tcp_store.check([_FAILURE]):
                return None
            return self.tcp_store.get(_FAILURE).decode()
        except RuntimeError as error:
            return f"the controller's store is gone ({error})"

    def put_stage_request(self, number: int, request: StageRequest) -> None:
        """Leave a request for the engine's ranks; requests are numbered from 0."""
        self.tcp_store.set(_request_key(number), encode_stage_request(request))

    def wait_stage_request(self, number: int) -> StageRequest:
        """Return request `number`, however long it takes to come; RuntimeError once the store is
        gone.

        Blocks every other use of this object.
        """
        return decode_stage_request(self.tcp_store.get(_request_key(number)))

    def drop_stage_request(self, number: int) -> None:
        self.tcp_store.delete_key(_request_key(number))

    def put_report(self, action: Action, rank: int, report: Report) -> None:
        self.tcp_store.set(_report_key(action, rank), encode_report(report))

    def take_report(self, action: Action, rank: int) -> Report | None:
        """Remove and return the report of a rank, or return None if there is none yet."""
        key = _report_key(action, rank)
        if not self.tcp_store.check([key]):
            return None
        report = decode_report(self.tcp_store.get(key))
        self.tcp_store.delete_key(key)
        return report


def _request_key(number: int) -> str:
    return f"stage/{number}"


def _report_key(action: Action, rank: int) -> str:
    return f"report/{action}/{rank}"
