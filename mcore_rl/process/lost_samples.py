"""Defines the error for stored samples that are lost with the process that kept them."""

from collections.abc import Collection, Sequence
from typing import Any


class SamplesLostError(RuntimeError):
    """Samples in `stores` (numbers) are lost; the message names the process and the cause.

    The reader samples them again, or goes on without them; nothing else is lost.
    """

    def __init__(self, message: str, stores: Collection[int]) -> None:
        super().__init__(message, tuple(sorted(stores)))
        self.message = message
        self.stores = frozenset(stores)

    def __str__(self) -> str:
        return self.message


def join_losses(losses: Sequence[SamplesLostError]) -> SamplesLostError:
    """Return one error for all losses, with each message once."""
    messages = dict.fromkeys(loss.message for loss in losses if loss.message)
    return SamplesLostError(
        "; ".join(messages), frozenset().union(*(loss.stores for loss in losses))
    )


def find_kept(samples: Sequence[Any], lost: SamplesLostError) -> list[int]:
    """Return the indices of the StoredSamples whose stores are not lost."""
    return [i for i, sample in enumerate(samples) if sample.lease.store not in lost.stores]
