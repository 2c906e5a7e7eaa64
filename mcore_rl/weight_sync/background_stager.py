"""Lets an engine rank receive, stage and forward weights in a thread while the engine decodes."""

import logging
import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from threading import Thread

import torch
from torch import Tensor

from mcore_rl.weight_sync.bucket_transfer import BucketTransfer
from mcore_rl.weight_sync.connection import Connection
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.reporting import publish_report, report_outcome
from mcore_rl.weight_sync.staging import Staging
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.verified_buckets import VerifiedBuckets
from mcore_rl.weight_sync.wire import Link, Report, StageRequest

_log = logging.getLogger(__name__)


def start_background_stager(connection: Connection, staging: Staging) -> None:
    """Serve the link's stage requests in a thread until the controller drops the link."""
    store = LinkStore.open(connection.end.link)
    stager = _BackgroundStager(store, connection, staging)
    Thread(target=stager.run, name="weights", daemon=True).start()


class _BackgroundStager:
    def __init__(self, store: LinkStore, connection: Connection, staging: Staging) -> None:
        self._store = store
        self._connection = connection
        self._link = connection.end.link
        self._staging = staging
        self._receiving: BucketTransfer | None = None
        """The transfer from a relay, kept for the next version."""
        self._forwarding: BucketTransfer | None = None
        """The idle transfer to the next engine; a thread takes it and returns it on success."""

    def run(self) -> None:
        """Serve requests in order; only a failure to receive from trainer ranks ends the link."""
        end = self._connection.end
        for number in count():
            try:
                request = self._store.wait_stage_request(number, end.name)
            except TransferError as error:
                _log.info("%s", error)  # also the way in which a dropped link ends
                break
            report = report_outcome(end.name, partial(self._stage, request))
            is_broken = report.error is not None and request.receive_link is None
            if is_broken:
                self._connection.close()
            if not publish_report(self._store, "receive", end.rank, report) or is_broken:
                break
        self._close_receiving()
        self._close_forwarding()

    def _stage(self, request: StageRequest) -> Report:
        verified = VerifiedBuckets()
        self._staging.version = None
        if request.forward_link is None:
            self._close_forwarding()
        else:
            self._start_forwarding(request.forward_link, request.version, verified)
        try:
            relay_transfer = None
            if request.receive_link is not None:
                relay_transfer = self._open_receiving(request.receive_link)
            report = self._connection.receive(
                request.version,
                self._staging.tensors,
                self._link.timeout_s,
                relay_transfer,
                verified,
            )
        except Exception as error:
            verified.fail(str(error))
            self._close_receiving()
            raise
        self._staging.version = request.version
        return report

    def _start_forwarding(self, link: Link, version: int, verified: VerifiedBuckets) -> None:
        # A swap exchanges tensors in the staging dictionary, so the thread gets a copy of it.
        arguments = (link, version, dict(self._staging.tensors), verified)
        Thread(target=self._forward, args=arguments, name="relay", daemon=True).start()

    @torch.no_grad()
    def _forward(
        self, link: Link, version: int, tensors: Mapping[str, Tensor], verified: VerifiedBuckets
    ) -> None:
        """Send verified buckets to the next engine.

        A failure concerns that engine alone, which then gets its slices from the trainer ranks.
        """
        transfer = self._forwarding
        self._forwarding = None
        try:
            if transfer is not None and transfer.link != link:
                transfer.close()
                transfer = None
            transfer = transfer or self._connection.open_relay_transfer(link)
            transfer.send(version, tensors, time.monotonic() + link.timeout_s, verified)
        except (TransferError, RuntimeError) as error:
            _log.warning(
                "version %d is not forwarded to engine %s: %s", version, link.engine, error
            )
            if transfer is not None:
                transfer.close()
        else:
            self._forwarding = transfer

    def _open_receiving(self, link: Link) -> BucketTransfer:
        if self._receiving is None or self._receiving.link != link:
            self._close_receiving()
            self._receiving = self._connection.open_relay_transfer(link)
        return self._receiving

    def _close_receiving(self) -> None:
        transfer = self._receiving
        self._receiving = None
        if transfer is not None:
            transfer.close()

    def _close_forwarding(self) -> None:
        transfer = self._forwarding
        self._forwarding = None
        if transfer is not None:
            transfer.close()
