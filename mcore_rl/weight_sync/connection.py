"""An engine rank's end of its link: receives versions, and verifies the rank's parameters.

    trainer rank's slices --sum--> kept by the engine rank while it receives a version
    live parameters, after the swap --packed again, bucket by bucket--> sum ------> compared

Checksums in flight are compared when a bucket arrives. This check covers everything after that: the
place, the swap, and any other write to the parameters.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.process.gc_pause import pause_collections
from mcore_rl.weight_sync.execute import PlanExecutor, VerifiedBuckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import PlacedBucket, RankBucket
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.transports.select import MakeTransport
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link, Report

_UNSIGNED = 2**64 - 1


@dataclass(frozen=True)
class SentSums:
    """The senders' checksums of the slices of one version.

    sums_P  int64 [slices], bucket after bucket
    """

    version: int
    sums_P: Tensor

    @staticmethod
    def join(version: int, sums: Sequence[Tensor]) -> "SentSums":
        """Join the checksums of each bucket, int64 [its slices]."""
        joined_P = torch.cat(list(sums)) if sums else torch.zeros(0, dtype=torch.int64)
        return SentSums(version, joined_P)

    def count_changed(self, before: "SentSums") -> int:
        """Return how many slices differ from those of version `before`."""
        return int((self.sums_P != before.sums_P).sum())


class DestinationCheck:
    """Reads an engine rank's slices back, with memory for one bucket on the rank's device."""

    def __init__(self, end: LinkEnd, buckets: Sequence[RankBucket], sums: str) -> None:
        """`buckets`: all buckets of the rank; `sums`: the kind of their checksums."""
        self._end = end
        self._buckets = buckets
        self._kind = sums
        self._stream = DeviceStream(end.device)
        most_words = max((own.bucket.num_words for own in buckets), default=0)
        with torch.inference_mode(False):
            self._scratch_W = torch.zeros(most_words, dtype=torch.int64, device=end.device)
        names = (part.shard.tensor for own in buckets for part in own.held)
        self._tensor_names = list(dict.fromkeys(names))
        self._bound: list[tuple[list[int], list[PlacedBucket]]] = []
        """Addresses of tensors, and the buckets bound to them: an engine's two sets take turns."""

    def check(self, version: int, tensors: Mapping[str, Tensor], sent: SentSums | None) -> None:
        """Check that the slices in `tensors` are those of `version`.

        Raises TransferError, which names the first slice that differs, or the version that was
        received instead.
        """
        if sent is None or sent.version != version:
            held = "none" if sent is None else str(sent.version)
            raise TransferError(
                f"{self._end.name} was to verify version {version}, but received {held} last"
            )
        different = self.find_difference(version, self.take_sums(tensors), sent)
        if different is not None:
            raise TransferError(
                f"{different}. The engine gets no requests until it is linked and synced anew"
                " (docs/debugging.md)"
            )

    def take_sums(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the checksums of the slices in `tensors`, int64 [slices]."""
        with self._stream.running():
            sums = []
            for placed in self._bind(tensors):
                placed.pack(version=0)
                sums.append(placed.sums_P)
            return SentSums.join(0, sums).sums_P

    def find_difference(self, version: int, found_P: Tensor, sent: SentSums) -> str | None:
        """Describe the first slice of `version` with another checksum; None if all agree."""
        differs_P = (found_P != sent.sums_P).nonzero()
        if not len(differs_P):
            return None
        first = int(differs_P[0])
        named = self._describe(version, first, int(found_P[first]), int(sent.sums_P[first]))
        return f"{named}; {len(differs_P)} of {len(found_P)} slices differ"

    def _bind(self, tensors: Mapping[str, Tensor]) -> list[PlacedBucket]:
        addresses = [tensors[name].data_ptr() for name in self._tensor_names]
        for known, buckets in self._bound:
            if known == addresses:
                return buckets
        with pause_collections():
            placed = [
                PlacedBucket(
                    own.bucket,
                    self._scratch_W[: own.bucket.num_words],
                    own.held,
                    tensors,
                    sums=self._kind,
                )
                for own in self._buckets
            ]
        self._bound = [*self._bound[-1:], (addresses, placed)]
        return placed

    def _describe(self, version: int, index: int, found: int, sent: int) -> str:
        """Describe slice number `index`, counted over all buckets, and both checksums."""
        places = [(own, piece) for own in self._buckets for piece in range(len(own.bucket.pieces))]
        own, number = places[index]
        box = own.bucket.pieces[number].box
        tensor = next(part.shard.tensor for part in own.held if part.piece == number)
        return (
            f"{box.name} {box.start} to {box.stop} of version {version} lies in {tensor} of"
            f" {self._end.name} with checksum {found & _UNSIGNED:#x}, but trainer rank"
            f" {own.bucket.source_rank} sent {sent & _UNSIGNED:#x}"
        )


class EngineConnection:
    """An engine rank's end of its link, and of relay links between engines of equal layouts."""

    def __init__(self, executor: PlanExecutor) -> None:
        self.end = executor.end
        self._executor = executor
        self._sent: SentSums | None = None
        """Those of the version received last."""
        self._destination: DestinationCheck | None = None
        self._loaded_P: Tensor | None = None
        """Checksums of what the engine rank loaded, until it received a version."""

    @property
    def digest(self) -> str:
        """The digest of the plan to which all ranks of the link agreed."""
        return self._executor.plan.digest

    @property
    def plan(self) -> RankPlan:
        return self._executor.plan

    @property
    def received_version(self) -> int | None:
        """The version received last; None without one."""
        return None if self._sent is None else self._sent.version

    @property
    def make_transport(self) -> MakeTransport:
        return self._executor.make_transport

    def make_report(self) -> Report:
        """Return the report of a link that is open."""
        return Report(self.end.name, self.digest, self._executor.num_bytes)

    def receive(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        timeout_s: float,
        relay: PlanExecutor | None = None,
        verified: VerifiedBuckets | None = None,
    ) -> Report:
        """Receive this rank's slices from trainer ranks, or by `relay` from another engine.

        Adds each bucket to `verified`, if given, once the bucket is placed.
        """
        began_s = time.monotonic()
        executor = relay or self._executor
        before = self._sent
        self._sent = None
        sums = executor.execute(version, tensors, began_s + timeout_s, verified)
        self._sent = SentSums.join(version, sums)
        self._compare_with_loaded(self._sent)
        num_slices = len(self._sent.sums_P)
        changed = None if before is None else self._sent.count_changed(before)
        report = executor.make_report(began_s)
        return replace(report, num_slices=num_slices, num_changed=changed)

    def check_destination(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Compare the slices in `tensors` with the checksums that came with `version`.

        Raises TransferError, which names a slice that differs.
        """
        self._get_destination_check().check(version, tensors, self._sent)

    def take_sent(self, sent: SentSums) -> None:
        """Have the next check compare with these checksums of a version that came another way."""
        self._sent = sent

    def expect(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the first received version compared with the current values of `tensors`."""
        self._loaded_P = self._get_destination_check().take_sums(tensors)

    def _get_destination_check(self) -> DestinationCheck:
        if self._destination is None:
            plan = self._executor.plan
            self._destination = DestinationCheck(self.end, plan.buckets, plan.sums)
        return self._destination

    def _compare_with_loaded(self, sent: SentSums) -> None:
        """Raise TransferError, which names a slice, if loaded weights differ from sent ones."""
        loaded_P = self._loaded_P
        self._loaded_P = None
        if loaded_P is None:
            return
        different = self._get_destination_check().find_difference(sent.version, loaded_P, sent)
        if different is not None:
            raise TransferError(
                "the engine loaded other weights from the checkpoint than the trainer sends before"
                f" its first step: {different}. One of them reads model.path wrongly;"
                " sync.verify=transfer turns the comparison off (docs/debugging.md#weights)"
            )

    def open_relay(self, link: Link) -> PlanExecutor:
        """Connect to the same rank of another engine over `link`, as sender or receiver.

        The relay link carries the same slices as this rank's own link. Raises TransferError if the
        peer does not connect within link.timeout_s.
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
        plan = self._executor.plan
        buckets = [replace(bucket, peer=peer) for bucket in plan.buckets]
        relay_plan = replace(plan, buckets=buckets, direct={})
        return PlanExecutor(end, relay_plan, self._executor.make_transport)

    def close(self) -> None:
        """Leave the link; peers that wait for this rank fail at once."""
        self._executor.close()
