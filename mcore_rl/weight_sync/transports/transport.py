"""Defines a transport: buckets travel between ranks by the three verbs send, recv and run.

Each link to an engine has its own transport. `bind` binds a bucket to a rank's tensors, `begin`
prepares for a version. `send` and `recv` start a message at once; `run` waits for started messages.
A message's memory belongs to the transport until the wait for the message is over. Received bytes
are valid until the next `run`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.weight_sync.placed_bucket import BucketEnd, PlacedBucket, RankBucket

NUM_SLOTS = 4
"""Buckets in flight, at most: per pair of ranks on one machine, per rank between machines."""

Failure = Callable[[], str | None]
"""Returns why waiting is pointless, or None. A wait calls this about twice a second."""


class Transport(Protocol):
    @property
    def num_ahead(self) -> int:
        """Messages that a sender may leave unread while it packs another."""
        ...

    @property
    def moves_with_storages(self) -> bool:
        """Whether bound buckets stay valid while the storages of their tensors move."""
        ...

    def needs_scratch(self, peer: int) -> bool:
        """Return whether buckets of `peer` whose message is shorter need `scratch_W` to bind."""
        ...

    def message(self, number: int, peer: int) -> Tensor | None:
        """Return the int64 words in which bucket `number` of the rank's plan must travel.

        None if this rank shares no memory with `peer`, the bucket's other rank; then the message
        may lie anywhere on `device(peer)`.
        """
        ...

    def device(self, peer: int) -> torch.device:
        """Return the device on which messages between this rank and `peer` must lie."""
        ...

    def bind(
        self,
        own: RankBucket,
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        scratch_W: Tensor,
        sums: str,
    ) -> BucketEnd:
        """Bind a bucket to this rank's `tensors` and to the words of the bucket's message.

        scratch_W  int64 words on the device of `tensors`, for a bucket that is packed and verified
                   outside of its message
        sums       kind of the checksums
        """
        ...

    def begin(
        self,
        version: int,
        set_number: int,
        buckets: Sequence[tuple[int, BucketEnd]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        """Prepare to move `version` from or into a set of tensors.

        set_number  the number by which peers recognize the set
        buckets     (peer, bucket bound to this set) for all buckets

        Raises TransferError as `run` does.
        """
        ...

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        """Start sending contiguous bytes to rank `peer`; `what` names them in errors.

        A later message of the same `number` to the same peer has the same length, and may travel as
        the difference from this message.
        """
        ...

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        """Start filling contiguous bytes from rank `peer`."""
        ...

    def run(self, deadline_s: float, failure: Failure, pending: int = 0) -> None:
        """Wait, oldest message first, until at most `pending` started messages are unfinished.

        Raises TransferError when time.monotonic() passes `deadline_s`, or when `failure` returns a
        reason why waiting is pointless.
        """
        ...

    def take_saved(self) -> int:
        """Return the bytes since the last call that did not travel, because they were as before."""
        ...

    def close(self) -> None:
        """Drop every connection; peers that wait for this rank fail."""
        ...


class WholeBuckets:
    """The base class of transports whose messages are whole buckets."""

    @property
    def num_ahead(self) -> int:
        return NUM_SLOTS - 1

    @property
    def moves_with_storages(self) -> bool:
        return False

    def needs_scratch(self, peer: int) -> bool:
        return True

    def message(self, number: int, peer: int) -> Tensor | None:
        return None

    def bind(
        self,
        own: RankBucket,
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        scratch_W: Tensor,
        sums: str,
    ) -> BucketEnd:
        # Packed and verified in the message if the message is on this rank's device.
        is_near = message_W.device == scratch_W.device
        words_W = message_W if is_near else scratch_W[: own.bucket.num_words]
        return PlacedBucket(own.bucket, words_W, own.held, tensors, message_W, sums)

    def begin(
        self,
        version: int,
        set_number: int,
        buckets: Sequence[tuple[int, BucketEnd]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        """Do nothing: each message contains its version and index."""

    def take_saved(self) -> int:
        return 0
