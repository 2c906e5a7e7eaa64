"""Sends a trainer rank's checksums of a version's slices in the place of the slices.

    trainer rank: own parameters --packed, dropped--> sums --store--> engine rank: compared

An engine rank that computed a version by itself learns so whether each bit is the trainer's.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mcore_rl.weight_sync.connection import DestinationCheck, SentSums
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import make_rank_key
from mcore_rl.weight_sync.plan_handshake import RankPlan


class SumsPublisher:
    """Publishes a trainer rank's checksums over one link, with memory for one bucket."""

    def __init__(self, end: LinkEnd, plan: RankPlan) -> None:
        self._end = end
        self._buckets = plan.buckets
        self._check = DestinationCheck(end, plan.buckets, plan.sums)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Publish the checksums of the slices of `tensors` to the engine rank that needs each."""
        counts = [len(own.bucket.pieces) for own in self._buckets]
        by_peer: dict[int, list[Tensor]] = defaultdict(list)
        parts = self._check.take_sums(tensors).cpu().split(counts) if counts else ()
        for own, sums_P in zip(self._buckets, parts, strict=True):
            by_peer[own.peer].append(sums_P)
        for peer, sums in by_peer.items():
            data = torch.cat(sums).numpy().tobytes()
            self._end.store.publish(_name_topic(version, peer), self._end.rank, data)


def collect_sums(end: LinkEnd, plan: RankPlan, version: int, deadline_s: float) -> SentSums:
    """Return the checksums of this engine rank's slices, which the trainer ranks publish.

    Raises TransferError, which names a rank without any at time.monotonic() `deadline_s`.
    """
    topic = _name_topic(version, end.rank)
    ranks = sorted({own.peer for own in plan.buckets})
    names = end.link.names
    found = end.store.collect(topic, ranks, names, end.name, deadline_s)
    left = {
        rank: torch.from_numpy(np.frombuffer(data, dtype=np.int64).copy())
        for rank, data in zip(ranks, found, strict=True)
    }
    for rank in ranks:
        end.store.client.delete(make_rank_key(topic, rank))
    sums = []
    for own in plan.buckets:
        num_pieces = len(own.bucket.pieces)
        sums.append(left[own.peer][:num_pieces])
        left[own.peer] = left[own.peer][num_pieces:]
    assert not any(map(len, left.values())), f"{end.name} got sums of other slices"
    return SentSums.join(version, [sums_P.to(end.device) for sums_P in sums])


def _name_topic(version: int, peer: int) -> str:
    return f"checksums of version {version} for rank {peer}"
