"""Chooses the route between two ranks by where both run, and makes the transport for it.

                      one machine                                        two machines
host to host          shared memory                                      gloo
GPU to GPU            sender's GPU memory, if the receiver can read it;  NCCL
                      else NCCL
GPU and host          as host to host, with one copy per bucket at the GPU's end

Over a link with differences, gloo carries them (delta.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream, gpu_id, readable_gpus
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.routes.channel import (
    Channel,
    SegmentServer,
    SegmentSpec,
    fetch_channel,
    machine_id,
)
from mcore_rl.stream.routes.delta import DeltaTransport
from mcore_rl.stream.routes.gloo import GlooTransport
from mcore_rl.stream.routes.gpu_pairs import GpuPairTransport
from mcore_rl.stream.routes.shared_memory import SharedMemoryTransport
from mcore_rl.stream.routes.transport import Transport

MakeTransport = Callable[[LinkEnd, Mapping[int, int], DeviceStream], Transport]
"""(end, shared_words, stream) -> transport. All ranks of a link call it.

shared_words  peer -> int64 words of memory to share with it, if any can be; its keys are the peers
stream        packs and places this rank's messages, on end.device
"""

Route = Literal["shared memory", "shared GPU memory", "NCCL", "gloo"]


@dataclass(frozen=True)
class RankLocation:
    """Where a rank runs, as it tells the other ranks of its link.

    machine         machine_id()
    gpu             id of the GPU that holds its tensors; empty for the host
    readable_gpus   ids of the GPUs whose memory it can read
    segment_server  a sender's SegmentServer; empty for receivers
    """

    machine: str
    gpu: str = ""
    readable_gpus: tuple[str, ...] = ()
    segment_server: str = ""


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
    senders: Sequence[RankLocation],
    receivers: Sequence[RankLocation],
    *,
    through_hosts: bool = False,
) -> bool:
    """Return whether any pair uses gloo, whose group all ranks of a link must make together.

    Which GPU a rank uses makes no difference, so ranks are first reduced to machine and
    host-or-GPU: time grows with the square of the machines, not of the ranks.
    """
    sender_kinds = {RankLocation(sender.machine, sender.gpu and "any") for sender in senders}
    receiver_kinds = {
        RankLocation(receiver.machine, receiver.gpu and "any") for receiver in receivers
    }
    return any(
        choose_route(sender, receiver, through_hosts=through_hosts) == "gloo"
        for sender in sender_kinds
        for receiver in receiver_kinds
    )


class RoutedTransport:
    """The transport of one rank: each peer's messages take the route to that peer."""

    def __init__(self, transports: Sequence[Transport], by_peer: Mapping[int, Transport]) -> None:
        self._transports = transports
        self._by_peer = by_peer
        self._started: list[Transport] = []
        """The transport of each message that may be unfinished, oldest first."""

    def memory(self, peer: int) -> Tensor | None:
        return self._by_peer[peer].memory(peer)

    def device(self, peer: int) -> torch.device:
        return self._by_peer[peer].device(peer)

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].send(tensor_u8, peer, what, number)

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].recv(tensor_u8, peer, what, number)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        # A run that waits for nothing tells peers at once that received messages may be
        # overwritten.
        for transport in self._transports:
            transport.run(deadline_s, failure, self._started.count(transport))
        while len(self._started) > pending:
            oldest = self._started.pop(0)
            oldest.run(deadline_s, failure, self._started.count(oldest))

    def take_saved(self) -> int:
        return sum(transport.take_saved() for transport in self._transports)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def make_routed_transport(
    end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
) -> RoutedTransport:
    """Return the transport that takes the best route to each peer in `shared_words`.

    All ranks of the link call this. Raises TransferError, which names those that did not by
    end.deadline_s.
    """
    server = SegmentServer() if end.is_sender else None
    locations = _exchange_locations(end, "" if server is None else server.name)
    routes = _routes_of(end, locations, shared_words)
    segments = _plan_segments(routes, shared_words, end.device)
    if server is not None:
        channels = server.serve(end, segments)
    else:
        channels = _fetch_channels(end, locations, segments)
    shared_memory = SharedMemoryTransport(end, channels, stream)
    transports: list[Transport] = [shared_memory]
    by_peer: dict[int, Transport] = dict.fromkeys(segments, shared_memory)
    num_senders = end.link.num_senders
    through_hosts = end.link.delta == "always"
    if needs_gloo(locations[:num_senders], locations[num_senders:], through_hosts=through_hosts):
        gloo = GlooTransport(end)
        gloo = gloo if end.link.delta == "off" else DeltaTransport(gloo)
        transports.append(gloo)
        by_peer |= dict.fromkeys(_peers_by(routes, "gloo"), gloo)
    nccl_peers = _peers_by(routes, "NCCL")
    if nccl_peers:
        gpu_pairs = GpuPairTransport(end, nccl_peers)
        transports.append(gpu_pairs)
        by_peer |= dict.fromkeys(nccl_peers, gpu_pairs)
    return RoutedTransport(transports, by_peer)


def make_gloo_transport(
    end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
) -> GlooTransport:
    """Return a transport that takes gloo to all peers, wherever they run."""
    return GlooTransport(end)


def make_delta_transport(
    end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
) -> DeltaTransport:
    """Return a transport of differences over gloo to all peers, wherever they run."""
    return DeltaTransport(GlooTransport(end))


def make_gpu_pair_transport(
    end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
) -> GpuPairTransport:
    """Return a transport that takes NCCL to all peers, each of which has a GPU of its own."""
    return GpuPairTransport(end, shared_words)


def _exchange_locations(end: LinkEnd, segment_server: str) -> list[RankLocation]:
    """Return the location of each rank of the link."""
    with end.store.errors_published("location", end.rank):
        device = end.device
        own = RankLocation(machine_id(), gpu_id(device), readable_gpus(device), segment_server)
        end.store.publish("location", end.rank, json.dumps(astuple(own)).encode())
    return [_decode_location(data) for data in end.collect("location")]


def _decode_location(data: bytes) -> RankLocation:
    machine, gpu, readable, segment_server = json.loads(data)
    return RankLocation(machine, gpu, tuple(readable), segment_server)


def _routes_of(
    end: LinkEnd, locations: Sequence[RankLocation], peers: Mapping[int, int]
) -> dict[int, Route]:
    """Return peer -> route of the messages between it and this rank."""
    own = locations[end.rank]
    choose = partial(choose_route, through_hosts=end.link.delta == "always")
    if end.is_sender:
        return {peer: choose(own, locations[peer]) for peer in peers}
    return {peer: choose(locations[peer], own) for peer in peers}


def _peers_by(routes: Mapping[int, Route], route: Route) -> list[int]:
    return [peer for peer, chosen in routes.items() if chosen == route]


def _plan_segments(
    routes: Mapping[int, Route], shared_words: Mapping[int, int], device: torch.device
) -> dict[int, SegmentSpec]:
    """Return the segments to share, by peer."""
    segments = {}
    for peer, route in routes.items():
        if route == "shared memory":
            segments[peer] = SegmentSpec(shared_words[peer], torch.device("cpu"))
        elif route == "shared GPU memory":
            segments[peer] = SegmentSpec(shared_words[peer], device)
    return segments


def _fetch_channels(
    end: LinkEnd, locations: Sequence[RankLocation], segments: Mapping[int, SegmentSpec]
) -> dict[int, Channel]:
    return {
        peer: fetch_channel(end, peer, locations[peer].segment_server, segment)
        for peer, segment in segments.items()
    }
