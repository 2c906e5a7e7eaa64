"""The key-value store of one link: where its ranks leave their layouts and reports for the others.

The controller serves it on its own port for as long as the link lives, so its keys go with the link.
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
    Order,
    Report,
    decode_order,
    decode_report,
    encode_order,
    encode_report,
)

TcpStore: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]

_DATA, _ERROR = b"D", b"E"
_FAILURE = "failure"
_LOOK_S = 5.0
"""How often a wait for keys looks whether the link has failed; torch warns each time."""
_FOREVER = timedelta(days=3650)
"""For an engine that waits for orders: training steps take as long as they take."""


class LinkStore:
    def __init__(self, tcp_store: Any) -> None:
        self.tcp_store = tcp_store

    @staticmethod
    def serve(host: str, timeout_s: float) -> "LinkStore":
        """A new store on a free port of `host`, reachable at that address only."""
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
    def open(link: Link, *, waits_for_orders: bool = False) -> "LinkStore":
        timeout = _FOREVER if waits_for_orders else timedelta(seconds=link.timeout_s)
        return LinkStore(
            TcpStore(link.store_host, link.store_port, is_master=False, timeout=timeout)
        )

    @property
    def port(self) -> int:
        return self.tcp_store.port

    @property
    def num_keys(self) -> int:
        return self.tcp_store.num_keys()

    def publish(self, what: str, rank: int, data: bytes) -> None:
        self.tcp_store.set(f"{what}/{rank}", _DATA + data)

    @contextmanager
    def errors_published(self, what: str, rank: int) -> Iterator[None]:
        """An error inside also tells the ranks that wait for `what` that it will not come, and why."""
        try:
            yield
        except Exception as error:
            self.tcp_store.set(f"{what}/{rank}", _ERROR + str(error).encode())
            raise

    def collect(
        self, what: str, ranks: Sequence[int], names: Sequence[str], waiting: str, deadline_s: float
    ) -> list[bytes]:
        """What each of `ranks` published, waiting for it until time.monotonic() passes `deadline_s`, or until
        a rank of the link fails.

        TransferError names the ranks (by `names`) that `waiting` waited for in vain, or the one that failed.
        """
        keys = [f"{what}/{rank}" for rank in ranks]
        began_s = time.monotonic()
        while not self._wait(keys, min(_LOOK_S, deadline_s - time.monotonic())):
            failure = self.failure()
            if failure is None and time.monotonic() < deadline_s:
                continue
            missing = [
                names[r]
                for r, key in zip(ranks, keys, strict=True)
                if not self.tcp_store.check([key])
            ]
            waited_s = time.monotonic() - began_s
            message = f"{waiting} waited {waited_s:.1f} s for the {what} of {', '.join(missing)}"
            raise TransferError(message + (f"; {failure}" if failure else ""), peer_lost=True)
        values = self.tcp_store.multi_get(keys)
        for rank, value in zip(ranks, values, strict=True):
            if value[:1] == _ERROR:
                raise TransferError(f"{names[rank]} failed: {value[1:].decode()}", peer_lost=True)
        return [value[1:] for value in values]

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all `keys` are there, within `seconds`."""
        try:
            self.tcp_store.wait(keys, timedelta(seconds=max(0.001, seconds)))
        except distributed.DistStoreError:
            return False
        return True

    def fail(self, message: str) -> str:
        """Tell all ranks of the link that it failed; returns what the first of them told, also if we did."""
        try:
            return self.tcp_store.compare_set(_FAILURE, "", message).decode()
        except RuntimeError:
            return message

    def failure(self) -> str | None:
        """The first failure that a rank of the link told of, if any."""
        try:
            return (
                self.tcp_store.get(_FAILURE).decode() if self.tcp_store.check([_FAILURE]) else None
            )
        except RuntimeError as error:
            return f"the controller's store is gone ({error})"

    def put_order(self, number: int, order: Order) -> None:
        """Tell the engine's ranks what to stage; orders count from 0."""
        self.tcp_store.set(_order_key(number), encode_order(order))

    def wait_order(self, number: int) -> Order:
        """Order `number`, however long it takes; RuntimeError once the store is gone.

        Blocks every other use of this object.
        """
        return decode_order(self.tcp_store.get(_order_key(number)))

    def drop_order(self, number: int) -> None:
        self.tcp_store.delete_key(_order_key(number))

    def put_report(self, action: Action, rank: int, report: Report) -> None:
        self.tcp_store.set(_report_key(action, rank), encode_report(report))

    def take_report(self, action: Action, rank: int) -> Report | None:
        """The report of a rank that has answered, removed from the store; None from one that has not."""
        key = _report_key(action, rank)
        if not self.tcp_store.check([key]):
            return None
        report = decode_report(self.tcp_store.get(key))
        self.tcp_store.delete_key(key)
        return report


def _order_key(number: int) -> str:
    return f"order/{number}"


def _report_key(action: Action, rank: int) -> str:
    return f"report/{action}/{rank}"
