"""Brings the ranks of a link to know one another: each publishes its facts, all get the roster."""

from dataclasses import replace

import torch

from mcore_rl.device.gpu_memory import gpu_id, readable_gpus
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import FACTS
from mcore_rl.weight_sync.roster import RankFacts, Roster
from mcore_rl.weight_sync.transports.channel import machine_id
from mcore_rl.weight_sync.transports.host.one_pass import find_library
from mcore_rl.weight_sync.transports.host.open_memory import OpenMemory
from mcore_rl.weight_sync.verify import kinds_of_sums


def describe_rank(
    device: torch.device, *, is_sender: bool, memory: OpenMemory | None = None
) -> RankFacts:
    """Return the facts of the calling rank, whose tensors are on `device`."""
    has_compiler = find_library() is not None
    return RankFacts(
        machine_id(),
        tuple(kinds_of_sums(device)),
        gpu_id(device),
        tuple(readable_gpus(device)),
        memory.name if memory is not None and has_compiler else "",
        is_sender and has_compiler,
    )


def publish_facts(end: LinkEnd) -> None:
    """Tell the other ranks of the link about this one, unless `end` came with the roster."""
    if end.roster is not None:
        return
    with end.store.errors_published(FACTS, end.rank, end.name):
        facts = describe_rank(end.device, is_sender=end.is_sender, memory=end.memory)
        end.store.publish(FACTS, end.rank, facts.encode())


def with_roster(end: LinkEnd) -> LinkEnd:
    """Return `end` with the roster, once all ranks of the link have published their facts.

    Raises TransferError, which names those that have not by end.deadline_s.
    """
    if end.roster is not None:
        return end
    return replace(end, roster=Roster.decode(end.wait_joined(FACTS)))
