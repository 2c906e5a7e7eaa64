"""Connects a rank to its peers by a plan, then moves one version after another by it."""

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from mcore_rl.process.garbage import collections_paused
from mcore_rl.weight_sync.bucket_transfer import BucketTransfer
from mcore_rl.weight_sync.destination import DestinationCheck, SentSums
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.plan_handshake import MakeShards, PlanHandshake
from mcore_rl.weight_sync.rank_plan import RankPlan
from mcore_rl.weight_sync.transports.choice import MakeTransport
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.verified_buckets import VerifiedBuckets
from mcore_rl.weight_sync.wire import Link, Report

SENDER_GRACE_S = 2.0
"""How much longer senders wait than the engine's ranks, so that a receiver's error comes first.

A receiver knows which sender it waits for. To the other senders, that receiver itself seems late.
"""


class Connection:
    """One rank's end of a link, and of relay links between engines of equal layouts."""

    def __init__(self, end: LinkEnd, plan: RankPlan, make_transport: MakeTransport) -> None:
        """Connect to the peers of `plan`, to which all ranks agreed, by end.deadline_s.

        Raises TransferError, which names the rank, if one does not come.
        """
        self.end = end
        self._make_transport = make_transport
        self.digest = plan.digest
        self.num_bytes = sum(own.bucket.num_bytes for own in plan.buckets)
        self._buckets = plan.buckets
        self._sums = plan.sums
        self._sent: SentSums | None = None
        """Those of the version received last."""
        self._destination: DestinationCheck | None = None
        self._loaded_P: Tensor | None = None
        """Checksums of what the engine rank loaded, until it received a version."""
        try:
            with collections_paused():
                self._transfer = BucketTransfer(
                    end, self._buckets, make_transport, plan.sums, plan.direct
                )
        except Exception as error:
            end.store.fail(f"{end.name}: {error}")  # no rank waits for this one any longer
            raise

    @staticmethod
    def meet(end: LinkEnd, make_shards: MakeShards, make_transport: MakeTransport) -> "Connection":
        """Meet the other ranks at the link's store, agree on the plan and connect.

        Raises TransferError, which names the rank, if one does not come, fails or disagrees.
        """
        handshake = PlanHandshake(end, make_shards)
        with collections_paused():
            plan = handshake.run()
        return Connection(handshake.end, plan, make_transport)

    @property
    def name(self) -> str:
        return self.end.name

    def send(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Send this trainer rank's slices."""
        began_s = time.monotonic()
        self._transfer.send(version, tensors, began_s + timeout_s + SENDER_GRACE_S)
        return self._report(began_s, self._transfer)

    def receive(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        timeout_s: float,
        relay_transfer: BucketTransfer | None = None,
        verified: VerifiedBuckets | None = None,
    ) -> Report:
        """Receive this engine rank's slices, from trainer ranks unless there is a `relay_transfer`.

        Buckets are added to `verified`, if given, once they are placed.
        """
        began_s = time.monotonic()
        transfer = relay_transfer or self._transfer
        before = self._sent
        self._sent = None
        sums = transfer.receive(version, tensors, began_s + timeout_s, verified)
        self._sent = SentSums.join(version, sums)
        self._compare_with_loaded(self._sent)
        report = self._report(began_s, transfer)
        num_slices = len(self._sent.sums_P)
        changed = None if before is None else self._sent.count_changed(before)
        return replace(report, num_slices=num_slices, num_changed=changed)

    def check_destination(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Compare the slices in `tensors` with the checksums that came with `version`.

        Raises TransferError, which names a slice that differs.
        """
        self._check().check(version, tensors, self._sent)

    def expect(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the version that is received first compared with what lies in `tensors` now."""
        self._loaded_P = self._check().sums(tensors)

    def _check(self) -> DestinationCheck:
        if self._destination is None:
            self._destination = DestinationCheck(self.end, self._buckets, self._sums)
        return self._destination

    def _compare_with_loaded(self, sent: SentSums) -> None:
        """Raise TransferError, which names a slice, if another was loaded than was sent."""
        loaded_P = self._loaded_P
        self._loaded_P = None
        if loaded_P is None:
            return
        different = self._check().find_difference(sent.version, loaded_P, sent)
        if different is not None:
            raise TransferError(
                "the engine loaded other weights from the checkpoint than the trainer sends before"
                f" its first step: {different}. One of them reads model.path wrongly;"
                " sync.verify=transfer turns the comparison off (docs/debugging.md#weights)"
            )

    def open_relay_transfer(self, link: Link) -> BucketTransfer:
        """Connect to the same rank of another engine over relay link `link`, as its sender or
        receiver.

        It carries the same slices as this rank's own link. Raises TransferError if the peer does
        not come within link.timeout_s.
        """
        own = self.end.side_rank
        forwards = link.relay == self.end.link.engine
        if forwards:
            rank = own
            peer = link.num_senders + own
        else:
            rank = link.num_senders + own
            peer = own
        end = LinkEnd.open(link, rank, self.end.device)
        buckets = [replace(bucket, peer=peer) for bucket in self._buckets]
        return BucketTransfer(end, buckets, self._make_transport, self._sums)

    def close(self) -> None:
        """Leave; peers that wait for this rank fail at once."""
        self._transfer.close()

    def _report(self, began_s: float, transfer: BucketTransfer) -> Report:
        seconds = time.monotonic() - began_s
        saved = transfer.take_saved()
        return Report(self.name, self.digest, self.num_bytes, len(self._buckets), seconds, saved)
