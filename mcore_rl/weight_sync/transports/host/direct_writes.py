"""Agrees between which ranks slices are written straight to their places, and for each version on
those places.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.transports.host.direct_bucket import DirectBucket
from mcore_rl.weight_sync.transports.host.one_pass import Targets
from mcore_rl.weight_sync.transports.host.open_memory import WriteAccess, WriteGrants


class DirectWrites:
    """One rank's grants to its peers, or its access to theirs.

    peers  ranks, counted over the link, whose buckets are DirectBuckets
    """

    def __init__(
        self, end: LinkEnd, servers: Mapping[int, str], writable: Callable[[int], bool]
    ) -> None:
        """Agree with each peer in `servers`; TransferError names one that does not come.

        servers   as RankPlan.direct, without peers that exchange nothing with this rank
        writable  a receiver's peer -> whether it can write all of its slices
        """
        self._grants: dict[int, WriteGrants] = {}
        self._access: dict[int, WriteAccess] = {}
        if end.is_sender:
            for peer, server in servers.items():
                access = WriteAccess.ask(end, peer, server)
                if access is not None:
                    self._access[peer] = access
        elif servers:
            assert end.memory is not None, "this rank offered its memory"
            self._grants = end.memory.serve(end, {peer: writable(peer) for peer in servers})

    @property
    def peers(self) -> frozenset[int]:
        return frozenset((*self._grants, *self._access))

    def drop(self, peer: int) -> None:
        """Forget a peer to which messages take another route than shared memory."""
        for ends in (self._grants, self._access):
            if peer in ends:
                ends.pop(peer).close()

    def grant(self, version: int, number: int, buckets: Iterable[tuple[int, DirectBucket]]) -> None:
        """Have the peers write `version` to the tensors, numbered `number`, of their buckets."""
        for peer, of_peer in _by_peer(buckets).items():
            targets = [bucket.own_targets for bucket in of_peer]
            counts = np.concatenate([each.counts for each in targets])
            moves = np.concatenate([each.moves for each in targets])
            self._grants[peer].grant(version, number, Targets(counts, moves))

    def wait(
        self,
        version: int,
        buckets: Iterable[tuple[int, DirectBucket]],
        deadline_s: float,
        failure: Callable[[], str | None],
    ) -> None:
        """Set the targets of the peers' buckets once all of them have granted `version`.

        Raises TransferError as Transport.run does.
        """
        for peer, of_peer in _by_peer(buckets).items():
            targets = self._access[peer].wait(version, deadline_s, failure)
            for bucket, own in zip(of_peer, _split(targets, of_peer), strict=True):
                bucket.targets = own

    def close(self) -> None:
        for end in (*self._grants.values(), *self._access.values()):
            end.close()


def _by_peer(buckets: Iterable[tuple[int, DirectBucket]]) -> dict[int, list[DirectBucket]]:
    by_peer: dict[int, list[DirectBucket]] = defaultdict(list)
    for peer, bucket in buckets:
        by_peer[peer].append(bucket)
    return by_peer


def _split(targets: Targets, buckets: Sequence[DirectBucket]) -> Iterator[Targets]:
    """Yield the targets of each bucket, whose slices follow one another in `targets`."""
    slice_at = 0
    move_at = 0
    for bucket in buckets:
        counts = targets.counts[slice_at : slice_at + len(bucket.bucket.pieces)]
        num_moves = int(counts.sum())
        yield Targets(counts, targets.moves[move_at : move_at + num_moves])
        slice_at += len(counts)
        move_at += num_moves
    assert (slice_at, move_at) == (len(targets.counts), len(targets.moves)), "slices are left over"
