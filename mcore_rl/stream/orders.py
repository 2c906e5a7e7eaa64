"""Beside an engine rank's decoding: what the controller orders is staged, and passed on to another engine."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from threading import Thread

import torch
from torch import Tensor

from mcore_rl.stream.bucket_transfer import Arrivals, BucketTransfer
from mcore_rl.stream.connection import Connection
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.staging import Staging
from mcore_rl.stream.wire import Action, Link, Order, Report

logger = logging.getLogger(__name__)


def follow_orders(connection: Connection, link: Link, rank: int, staging: Staging) -> None:
    """Start a thread that follows the orders in the link's store until the controller drops the link."""
    store = LinkStore.open(link, waits_for_orders=True)
    follower = _Follower(store, connection, link, rank, staging)
    Thread(target=follower.run, name="weights", daemon=True).start()


class _Follower:
    def __init__(
        self, store: LinkStore, connection: Connection, link: Link, rank: int, staging: Staging
    ) -> None:
        self._store, self._connection, self._link = store, connection, link
        self._rank, self._staging = rank, staging
        self._upstream: BucketTransfer | None = None
        self._downstream: BucketTransfer | None = None
        """Not in use; the thread that passes slices on takes it and puts it back if all went well."""

    def run(self) -> None:
        """A failure between this rank and the trainer ranks is the end of the link, others are not."""
        for number in count():
            try:
                order = self._store.wait_order(number)
            except RuntimeError:
                break
            report = attempt(self._link.names[self._rank], partial(self._stage, order))
            is_broken = report.error is not None and order.upstream is None
            if is_broken:
                self._connection.close()
            if not publish(self._store, "receive", self._rank, report) or is_broken:
                break
        self._drop_upstream()
        self._drop_downstream()

    def _stage(self, order: Order) -> Report:
        arrivals = Arrivals()
        staging, link = self._staging, self._link
        staging.version = None
        if order.downstream is None:
            self._drop_downstream()
        else:
            arguments = (order.downstream, order.version, dict(staging.tensors), arrivals)
            Thread(target=self._pass_on, args=arguments, name="relay", daemon=True).start()
        try:
            upstream = None if order.upstream is None else self._open_upstream(order.upstream)
            report = self._connection.receive(
                order.version, staging.tensors, link.timeout_s, upstream, arrivals
            )
        except Exception as error:
            arrivals.fail(str(error))
            self._drop_upstream()
            raise
        staging.version = order.version
        return report

    @torch.no_grad()
    def _pass_on(
        self, link: Link, version: int, tensors: Mapping[str, Tensor], arrivals: Arrivals
    ) -> None:
        """A failure is the next engine's, which then gets its slices from the trainer ranks."""
        passage, self._downstream = self._downstream, None
        try:
            if passage is not None and passage.link != link:
                passage.close()
                passage = None
            passage = passage or self._connection.open_passage(link)
            passage.send(version, tensors, time.monotonic() + link.timeout_s, arrivals)
        except (TransferError, RuntimeError) as error:
            logger.warning(
                "version %d is not passed on to engine %s: %s", version, link.engine, error
            )
            if passage is not None:
                passage.close()
        else:
            self._downstream = passage

    def _open_upstream(self, link: Link) -> BucketTransfer:
        if self._upstream is None or self._upstream.link != link:
            self._drop_upstream()
            self._upstream = self._connection.open_passage(link)
        return self._upstream

    def _drop_upstream(self) -> None:
        passage, self._upstream = self._upstream, None
        if passage is not None:
            passage.close()

    def _drop_downstream(self) -> None:
        passage, self._downstream = self._downstream, None
        if passage is not None:
            passage.close()


@torch.no_grad()
def attempt(name: str, work: Callable[[], Report]) -> Report:
    """What `work` reports; an error of it is logged and becomes the report of rank `name`."""
    began_s = time.monotonic()
    try:
        return work()
    except Exception as error:
        logger.exception("weight update failed")
        message = (
            str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        )
        lost = isinstance(error, TransferError) and error.peer_lost
        return Report(name, seconds=time.monotonic() - began_s, error=message, peer_lost=lost)


def publish(store: LinkStore, action: Action, rank: int, report: Report) -> bool:
    """Whether the controller's store was still there."""
    try:
        store.put_report(action, rank, report)
    except RuntimeError:
        logger.exception("the controller's store is gone; this report is lost: %s", report)
        return False
    return True
