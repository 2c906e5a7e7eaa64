"""Describes one rank's end of a link; the handshake and the transports are built from it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.roster import Roster
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.wire import Link

if TYPE_CHECKING:
    from mcore_rl.weight_sync.transports.host.open_memory import OpenMemory


@dataclass(frozen=True)
class LinkEnd:
    """A rank of a link, and where and until when it meets the other ranks.

    rank        counts over the whole link: senders first, then the engine's ranks
    deadline_s  time.monotonic() by which all ranks must have connected; each transfer has its own
    device      where this rank's tensors are
    memory      an engine rank's, if it opens it to trainer ranks of its machine
    roster      the link's; None until this rank has it
    """

    store: LinkStore
    link: Link
    rank: int
    deadline_s: float
    device: torch.device
    memory: "OpenMemory | None" = None
    roster: Roster | None = None

    @staticmethod
    def open(
        link: Link,
        rank: int,
        device: torch.device,
        memory: "OpenMemory | None" = None,
        roster: Roster | None = None,
    ) -> "LinkEnd":
        """Return an end whose ranks have link.timeout_s to meet from now on."""
        deadline_s = time.monotonic() + link.timeout_s
        return LinkEnd(LinkStore.open(link), link, rank, deadline_s, device, memory, roster)

    @property
    def name(self) -> str:
        return self.link.name_of(self.rank)

    @property
    def is_sender(self) -> bool:
        return self.rank < self.link.num_senders

    @property
    def side_rank(self) -> int:
        """The rank counted among the ranks of its own side."""
        return self.rank if self.is_sender else self.rank - self.link.num_senders

    def collect(self, topic: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """LinkStore.collect from `ranks` (default: all of the link), by this end's deadline."""
        names = self.link.names
        if ranks is None:
            ranks = range(len(names))
        return self.store.collect(topic, ranks, names, self.name, self.deadline_s)

    def wait_joined(self, topic: str) -> bytes:
        """LinkStore.wait_joined of all ranks of the link, by this end's deadline."""
        return self.store.wait_joined(topic, self.link.names, self.name, self.deadline_s)

    def lost(self, what: str, reason: str, began_s: float) -> TransferError:
        """Return the error of a wait for `what` that began at time.monotonic() `began_s`."""
        waited_s = time.monotonic() - began_s
        return TransferError(
            f"{self.name} waited {waited_s:.1f} s for {what}: {reason}", peer_lost=True
        )
