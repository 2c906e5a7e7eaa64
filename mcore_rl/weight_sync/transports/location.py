"""Chooses the route between two ranks by where both run. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

SOME_GPU = "a GPU"
"""The GPU of a rank that shares no machine with ranks of the other side."""
Route = Literal["shared memory", "shared GPU memory", "NCCL", "gloo"]


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs.

    machine        equal for ranks of one machine
    gpu            id of the GPU that holds its tensors; empty for the host
    readable_gpus  ids of the GPUs whose memory it can read
    """

    machine: str
    gpu: str = ""
    readable_gpus: tuple[str, ...] = ()


def choose_route(
    sender: RankLocation, receiver: RankLocation, *, through_hosts: bool = False
) -> Route:
    """Return the best route; `through_hosts`: between machines, GPUs' messages go by hosts."""
    same_machine = sender.machine == receiver.machine
    if not sender.gpu or not receiver.gpu:
        return "shared memory" if same_machine else "gloo"
    if same_machine and sender.gpu in receiver.readable_gpus:
        return "shared GPU memory"
    return "gloo" if through_hosts and not same_machine else "NCCL"


def needs_gloo(
    senders: Collection[RankLocation],
    receivers: Collection[RankLocation],
    *,
    through_hosts: bool = False,
) -> bool:
    """Return whether any pair uses gloo, whose group all ranks of a link must make together.

    Time grows with the product of both numbers: pass each place once, not each rank.
    """
    return any(
        choose_route(sender, receiver, through_hosts=through_hosts) == "gloo"
        for sender in senders
        for receiver in receivers
    )
