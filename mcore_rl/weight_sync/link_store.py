"""Serves one link's key-value store, which holds layouts, failures, stage requests and reports.

The controller serves it on a port of its own for as long as the link lives; its contents end with
the link. Only processes that got the link, and with it the store's random key, can connect.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mcore_rl.weight_sync.link_keeper import DATA, ERROR, joined_key, keep_link, rank_key
from mcore_rl.weight_sync.store.client import (
    Client,
    LocalClient,
    RemoteClient,
    StoreLost,
    TorchStore,
)
from mcore_rl.weight_sync.store.server import LONGEST_WAIT_S, StoreServer
from mcore_rl.weight_sync.transports.transport import FAILURE_POLL_S, TransferError
from mcore_rl.weight_sync.wire import (
    Action,
    Link,
    Report,
    StageRequest,
    decode_report,
    decode_stage_request,
    encode_report,
    encode_stage_request,
)

_FAILURE = "failure"
_FAILURE_POLL_S = 5.0
"""How often a wait for keys checks whether the link has failed."""
_MAX_NAMES = 16
"""Ranks that an error names."""


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
    def open(link: Link) -> "LinkStore":
        """Return a client of the store of `link`, which connects when it is first used."""
        client = RemoteClient(link.store_host, link.store_port, link.store_key)
        return LinkStore(client, link.timeout_s, None)

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

    def keep(self, link: Link) -> None:
        """Join what the ranks of `link` publish here, as link_keeper.py says."""
        keep_link(self._served.values, link)

    def publish(self, topic: str, rank: int, data: bytes) -> None:
        """Publish this rank's `data` on `topic` to all ranks of the link."""
        self.client.set(rank_key(topic, rank), DATA + data)

    def publish_tagged(self, topic: str, values: Sequence[bytes]) -> None:
        """Publish what the first ranks would: DATA and a rank's data each, or ERROR and a message.

        For the process that serves.
        """
        keyed = {rank_key(topic, rank): value for rank, value in enumerate(values)}
        self._served.values.set_all(keyed)

    def publish_error(self, topic: str, rank: int, name: str, message: str) -> None:
        """Publish that rank `name` failed, in place of its data; no rank waits for others then."""
        self.client.set(rank_key(topic, rank), ERROR + message.encode())
        self.client.compare_set(
            joined_key(topic), b"", ERROR + f"{name} failed: {message}".encode()
        )

    @contextmanager
    def errors_published(self, topic: str, rank: int, name: str) -> Iterator[None]:
        """Publish an error raised inside in place of this rank's data, so that no rank waits."""
        try:
            yield
        except Exception as error:
            self.publish_error(topic, rank, name, str(error))
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
        keys = [rank_key(topic, rank) for rank in ranks]
        began_s = time.monotonic()
        while not self.client.wait(keys, min(_FAILURE_POLL_S, deadline_s - time.monotonic())):
            self._check_wait(topic, ranks, names, waiting, began_s, deadline_s)
        values = self.client.get_all(keys)
        for rank, value in zip(ranks, values, strict=True):
            if value[:1] == ERROR:
                raise TransferError(f"{names[rank]} failed: {value[1:].decode()}", peer_lost=True)
        return [value[1:] for value in values]

    def wait_joined(
        self, topic: str, names: Sequence[str], waiting: str, deadline_s: float
    ) -> bytes:
        """Return what was joined from the values of all ranks, whose names are `names`, on `topic`.

        Waits and fails as `collect` does, with one request instead of one for each rank.
        """
        key = joined_key(topic)
        began_s = time.monotonic()
        while True:
            value = self.client.fetch(key, min(_FAILURE_POLL_S, deadline_s - time.monotonic()))
            if value is not None:
                return _untagged(value)
            self._check_wait(topic, range(len(names)), names, waiting, began_s, deadline_s)

    async def wait_joined_async(
        self, topic: str, names: Sequence[str], waiting: str, deadline_s: float
    ) -> bytes:
        """Do as `wait_joined`, without blocking the event loop; for the process that serves."""
        key = joined_key(topic)
        began_s = time.monotonic()
        while not await self.wait_present([key], FAILURE_POLL_S):
            self._check_wait(topic, range(len(names)), names, waiting, began_s, deadline_s)
        (value,) = self.client.get_all([key])
        return _untagged(value)

    async def wait_present(self, keys: Sequence[str], seconds: float) -> bool:
        """Return whether all of `keys` are set within `seconds`; for the process that serves.

        The call that sets the last of them wakes the waiting coroutine.
        """
        loop = asyncio.get_running_loop()
        present = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(present.set)

        values = self._served.values
        waiter = values.when_present(keys, wake)
        if waiter is None:
            return True
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await present.wait()
            return True
        except TimeoutError:
            return False
        finally:
            values.forget(waiter)

    def _check_wait(
        self,
        topic: str,
        ranks: Sequence[int],
        names: Sequence[str],
        waiting: str,
        began_s: float,
        deadline_s: float,
    ) -> None:
        """Return if a wait may go on; else raise a TransferError that names who is waited for."""
        failure = self.failure()
        if failure is None and time.monotonic() < deadline_s:
            return
        missing = set(self.client.missing([rank_key(topic, rank) for rank in ranks]))
        late = [names[rank] for rank in ranks if rank_key(topic, rank) in missing]
        shown = ", ".join(late[:_MAX_NAMES])
        if len(late) > _MAX_NAMES:
            shown += f" and {len(late) - _MAX_NAMES} more ranks"
        waited_s = time.monotonic() - began_s
        message = f"{waiting} waited {waited_s:.1f} s for the {topic} of {shown}"
        raise TransferError(message + (f"; {failure}" if failure else ""), peer_lost=True)

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

    def wait_stage_request(self, number: int, waiting: str) -> StageRequest:
        """Return request `number`, for which rank `waiting` waits while the trainer computes.

        A step takes as long as it takes, but the store answers every few seconds. Raises
        TransferError if it is silent for longer than a client waits for any answer. Blocks every
        other use of this object.
        """
        key = _request_key(number)
        began_s = time.monotonic()
        try:
            while True:
                data = self.client.fetch(key, LONGEST_WAIT_S)
                if data is not None:
                    return decode_stage_request(data)
        except StoreLost as error:
            waited_s = time.monotonic() - began_s
            raise TransferError(
                f"{waiting} waited {waited_s:.1f} s for the controller to request weights (number"
                f" {number}), and it no longer answers: {error}",
                peer_lost=True,
            ) from error

    def drop_stage_request(self, number: int) -> None:
        self.client.delete(_request_key(number))

    def put_report(self, action: Action, rank: int, report: Report) -> None:
        self.client.set(report_key(action, rank), encode_report(report))

    def has_error(self, action: Action, ranks: Sequence[int]) -> bool:
        """Return whether any report that is there has an error."""
        found = (self.client.get(report_key(action, rank)) for rank in ranks)
        return any(decode_report(data).error for data in found if data is not None)

    def take_report(self, action: Action, rank: int) -> Report | None:
        """Remove and return the report of a rank, or return None if there is none yet."""
        key = report_key(action, rank)
        report = self.client.get(key)
        if report is None:
            return None
        self.client.delete(key)
        return decode_report(report)


def _untagged(value: bytes) -> bytes:
    """Return the data that was joined; TransferError if a rank failed instead."""
    if value[:1] == ERROR:
        raise TransferError(value[1:].decode(), peer_lost=True)
    return value[1:]


def _request_key(number: int) -> str:
    return f"stage/{number}"


def report_key(action: Action, rank: int) -> str:
    return f"report/{action}/{rank}"
