"""Hands verified buckets from a relay's receiving thread to its forwarding thread."""

import time
from threading import Condition

from torch import Tensor

from mcore_rl.weight_sync.transports.transport import TransferError


class VerifiedBuckets:
    """The buckets of one version that are verified and placed, in order."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._failure: str | None = None
        self._changed = Condition()

    def add(self, sums_P: Tensor) -> None:
        """Add the next bucket, with the checksums its sender took."""
        with self._changed:
            self._sums.append(sums_P)
            self._changed.notify_all()

    def fail(self, failure: str) -> None:
        """Announce that no more buckets will come."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wait(self, index: int, deadline_s: float) -> Tensor:
        """Return the checksums of bucket `index` once it is verified.

        Raises TransferError if it fails, or is not verified when time.monotonic() passes
        `deadline_s`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._sums) > index or self._failure,
                max(0.0, deadline_s - time.monotonic()),
            )
            if len(self._sums) > index:
                return self._sums[index]
        reason = self._failure or "the time is up"
        raise TransferError(f"bucket {index} cannot be forwarded: {reason}", peer_lost=True)
