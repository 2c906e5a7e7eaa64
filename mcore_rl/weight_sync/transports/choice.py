"""Chooses the route between two ranks by where both run, and makes the transport for it.

                      one machine                                        two machines
host to host          shared memory                                      gloo
GPU to GPU            sender's GPU memory, if the receiver can read it;  NCCL
                      else NCCL
GPU and host          as host to host, with one copy per bucket at the GPU's end

Over a link with differences, gloo carries them (delta.py).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.meeting import publish_facts, with_roster
from mcore_rl.weight_sync.roster import SOME_GPU, RankLocation, Roster, Route, choose_route
from mcore_rl.weight_sync.transports.channel import (
    Channel,
    SegmentSpec,
    fetch_channel,
    serve_segments,
)
from mcore_rl.weight_sync.transports.delta import DeltaTransport
from mcore_rl.weight_sync.transports.gloo import GlooTransport
from mcore_rl.weight_sync.transports.gpu_pairs import GpuPairTransport
from mcore_rl.weight_sync.transports.shared_memory import SharedMemoryTransport
from mcore_rl.weight_sync.transports.transport import Transport

MakeTransport = Callable[[LinkEnd, Mapping[int, int], DeviceStream], Transport]
"""(end, shared_words, stream) -> transport. All ranks of a link call it.

shared_words  peer -> int64 words of memory to share with it, if any can be; its keys are the peers
stream        packs and places this rank's messages, on end.device
"""


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
    end = _introduced(end)
    assert end.roster is not None, "a rank connects with the roster"
    routes = _routes_of(end, shared_words)
    segments = _plan_segments(routes, shared_words, end.device)
    if not segments:
        channels: Mapping[int, Channel] = {}
    elif end.is_sender:
        channels = serve_segments(end, segments)
    else:
        channels = {peer: fetch_channel(end, peer, spec) for peer, spec in segments.items()}
    shared_memory = SharedMemoryTransport(end, channels, stream)
    transports: list[Transport] = [shared_memory]
    by_peer: dict[int, Transport] = dict.fromkeys(segments, shared_memory)
    if end.roster.gloo:
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


def waits_for_peers(end: LinkEnd) -> bool:
    """Return whether make_routed_transport may wait for other ranks of the link."""
    assert end.roster is not None, "a rank connects with the roster"
    return end.roster.gloo or end.rank in end.roster.met or not end.link.staged


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


def _introduced(end: LinkEnd) -> LinkEnd:
    """Return `end` with the roster; between engines, ranks meet only when they connect."""
    publish_facts(end)
    return with_roster(end)


def _routes_of(end: LinkEnd, peers: Mapping[int, int]) -> dict[int, Route]:
    """Return peer -> route of the messages between it and this rank."""
    assert end.roster is not None, "a rank connects with the roster"
    roster = end.roster
    own = _location(roster, end.rank)
    through_hosts = end.link.delta == "always"
    routes: dict[int, Route] = {}
    chosen: dict[tuple[int, int], Route] = {}
    """By a peer's host and whether it is on a GPU, where no facts are told."""
    for peer in peers:
        place = roster.hosts[peer], roster.on_gpu[peer]
        if peer in roster.met or place not in chosen:
            their = _location(roster, peer)
            sides = (own, their) if end.is_sender else (their, own)
            chosen[place] = choose_route(*sides, through_hosts=through_hosts)
        routes[peer] = chosen[place]
    return routes


def _location(roster: Roster, rank: int) -> RankLocation:
    """Return where a rank runs; its GPU has a name only where ranks of both sides run."""
    host, on_gpu = roster.hosts[rank], roster.on_gpu[rank]
    facts = roster.met.get(rank)
    if facts is None:
        return RankLocation(str(host), SOME_GPU if on_gpu else "")
    return RankLocation(str(host), facts.gpu, facts.readable_gpus)


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
