"""Selects the transport between two ranks by their places, and logs it.

                      one machine                                        two machines
host to host          written straight to its place, if the engine rank  gloo
                      opens its memory; else shared memory
GPU to GPU            sender's GPU memory, if the receiver can read and   NCCL
                      open it, in buckets or pulled from its storages
                      (pull.py); else NCCL
GPU and host          as shared memory, with one copy per bucket at      as host to host, with one
                      the GPU's end                                      copy at the GPU's end

Over a link with differences, gloo carries them (delta.py).
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.link_end import LinkEnd, await_roster, publish_facts
from mcore_rl.weight_sync.placed_bucket import BucketEnd, RankBucket
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.roster import (
    SOME_GPU,
    RankLocation,
    Roster,
    Route,
    choose_route,
    explain_route,
)
from mcore_rl.weight_sync.transports.delta import DeltaTransport
from mcore_rl.weight_sync.transports.gloo import GlooTransport
from mcore_rl.weight_sync.transports.gpu_pairs import GpuPairTransport
from mcore_rl.weight_sync.transports.host.direct import (
    DirectTransport,
    DirectWrites,
    can_be_written,
    count_direct_words,
)
from mcore_rl.weight_sync.transports.pull import Peers, PullTransport, agree_on_pulls
from mcore_rl.weight_sync.transports.shared_memory import (
    Channel,
    SegmentSpec,
    SharedMemoryTransport,
    close_on_error,
    fetch_channels,
    serve_segments,
)
from mcore_rl.weight_sync.transports.transport import NUM_SLOTS, Failure, Transport
from mcore_rl.weight_sync.waits import TransferError

_log = logging.getLogger(__name__)
_MOST_NAMED = 8
"""Peers that a line of the log names."""

MakeTransport = Callable[[LinkEnd, RankPlan, DeviceStream], Transport]
"""(end, plan, stream) -> transport to the peers of the plan. All ranks of a link call this.

stream  packs and places this rank's messages, on end.device
"""


class RoutedTransport:
    """The transport of one rank: each peer's messages take the route to that peer."""

    def __init__(self, transports: Sequence[Transport], by_peer: Mapping[int, Transport]) -> None:
        self._transports = transports
        self._by_peer = by_peer
        self._started: list[Transport] = []
        """The transport of each message that may be unfinished, oldest first."""

    @property
    def num_ahead(self) -> int:
        return min((each.num_ahead for each in self._by_peer.values()), default=0)

    @property
    def kinds(self) -> list[str]:
        """The names of the transports that this rank's peers take."""
        return [type(each).__name__ for each in self._transports]

    @property
    def moves_with_storages(self) -> bool:
        return all(each.moves_with_storages for each in self._by_peer.values())

    def needs_scratch(self, peer: int) -> bool:
        return self._by_peer[peer].needs_scratch(peer)

    def message(self, number: int, peer: int) -> Tensor | None:
        return self._by_peer[peer].message(number, peer)

    def device(self, peer: int) -> torch.device:
        return self._by_peer[peer].device(peer)

    def bind(
        self,
        own: RankBucket,
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        scratch_W: Tensor,
        sums: str,
    ) -> BucketEnd:
        return self._by_peer[own.peer].bind(own, tensors, message_W, scratch_W, sums)

    def begin(
        self,
        version: int,
        set_number: int,
        buckets: Sequence[tuple[int, BucketEnd]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        for transport in self._transports:
            carried = [each for each in buckets if self._by_peer[each[0]] is transport]
            transport.begin(version, set_number, carried, deadline_s, failure)

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].send(tensor_u8, peer, what, number)

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].recv(tensor_u8, peer, what, number)

    def run(self, deadline_s: float, failure: Failure, pending: int = 0) -> None:
        # Even without a wait, `run` tells peers that received messages may be overwritten.
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


def select_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> RoutedTransport:
    """Return the transport that takes the best route to each peer of the plan.

    All ranks of the link call this. Raises TransferError, which names the ranks that did not by
    end.deadline_s, or a peer on this rank's GPU whose memory cannot be opened.
    """
    end = _introduce(end)
    peers = dict.fromkeys(own.peer for own in plan.buckets)
    routes = _find_routes(end, peers)
    writes = _agree_on_writes(end, plan, _list_peers(routes, "shared memory"))
    candidates = _list_peers(routes, "shared GPU memory") if end.link.pulls else ()
    pulls = agree_on_pulls(end, plan.buckets, candidates)
    slots, shared_words = plan_slots(plan.buckets, {*writes.peers, *pulls})
    segments = _plan_segments(routes, shared_words, end.device, pulls)
    channels = _open_channels(end, segments)
    with close_on_error(channels):
        unopened = segments.keys() - channels.keys()
        _refuse_one_gpu(end, unopened)
        routes |= dict.fromkeys(unopened, "NCCL")
        _log_routes(end, routes)
        transports = _make_transports(end, routes, channels, stream, slots, writes, pulls)
    by_peer = {peer: each for each, to in transports for peer in to}
    return RoutedTransport([each for each, _ in transports], by_peer)


def _make_transports(
    end: LinkEnd,
    routes: Mapping[int, Route],
    channels: Mapping[int, Channel],
    stream: DeviceStream,
    slots: Sequence[slice],
    writes: DirectWrites,
    pulls: Peers,
) -> list[tuple[Transport, Collection[int]]]:
    """Return each transport and its peers; `slots`, `writes` and `pulls` are of the channels."""
    assert end.roster is not None, "a rank connects with the roster"
    direct = {peer: each for peer, each in channels.items() if peer in writes.peers}
    pulled = {peer: each for peer, each in channels.items() if peer in pulls}
    shared = {peer: each for peer, each in channels.items() if peer not in {*direct, *pulled}}
    transports: list[tuple[Transport, Collection[int]]] = []
    if pulled:
        transports.append((PullTransport(end, pulled, stream, slots, pulls), pulled))
    if direct:
        transports.append((DirectTransport(end, direct, stream, slots, writes), direct))
    if shared:
        transports.append((SharedMemoryTransport(end, shared, stream, slots), shared))
    if end.roster.gloo:
        gloo = GlooTransport(end)
        between = gloo if end.link.delta == "off" else DeltaTransport(gloo)
        transports.append((between, _list_peers(routes, "gloo")))
    nccl_peers = _list_peers(routes, "NCCL")
    if nccl_peers:
        transports.append((GpuPairTransport(end, nccl_peers), nccl_peers))
    return transports


def waits_for_peers(end: LinkEnd) -> bool:
    """Return whether select_transport may wait for other ranks of the link."""
    assert end.roster is not None, "a rank connects with the roster"
    return end.roster.gloo or end.rank in end.roster.met or not end.link.staged


def make_gloo_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> GlooTransport:
    """Return a transport that takes gloo to all peers, wherever they run."""
    return GlooTransport(end)


def make_delta_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> DeltaTransport:
    """Return a transport of differences over gloo to all peers, wherever they run."""
    return DeltaTransport(GlooTransport(end))


def make_gpu_pair_transport(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> GpuPairTransport:
    """Return a transport that takes NCCL to all peers, each of which has a GPU of its own."""
    return GpuPairTransport(end, dict.fromkeys(own.peer for own in plan.buckets))


def _introduce(end: LinkEnd) -> LinkEnd:
    """Return `end` with the roster; between engines, ranks meet only when they connect."""
    publish_facts(end)
    return await_roster(end)


def _find_routes(end: LinkEnd, peers: Iterable[int]) -> dict[int, Route]:
    """Return peer -> route of the messages between the peer and this rank."""
    assert end.roster is not None, "a rank connects with the roster"
    roster = end.roster
    own = _locate(roster, end.rank)
    through_hosts = end.link.delta == "always"
    routes: dict[int, Route] = {}
    chosen: dict[tuple[int, int], Route] = {}
    """By a peer's host and whether it is on a GPU, where no facts are told."""
    for peer in peers:
        place = roster.hosts[peer], roster.on_gpu[peer]
        if peer in roster.met or place not in chosen:
            their = _locate(roster, peer)
            sides = (own, their) if end.is_sender else (their, own)
            chosen[place] = choose_route(*sides, through_hosts=through_hosts)
        routes[peer] = chosen[place]
    return routes


def _locate(roster: Roster, rank: int) -> RankLocation:
    """Return the place of a rank; its GPU is known only on hosts of both sides."""
    host, on_gpu = roster.hosts[rank], roster.on_gpu[rank]
    facts = roster.met.get(rank)
    if facts is None:
        return RankLocation(str(host), SOME_GPU if on_gpu else "")
    return RankLocation(str(host), facts.gpu, facts.readable_gpus)


def _refuse_one_gpu(end: LinkEnd, unopened: Collection[int]) -> None:
    """Raise TransferError if a peer of `unopened` is on this rank's GPU: NCCL has no way there."""
    assert end.roster is not None, "a rank connects with the roster"
    own_gpu = _locate(end.roster, end.rank).gpu
    for peer in sorted(unopened):
        if _locate(end.roster, peer).gpu == own_gpu:
            raise TransferError(
                f"{end.name} and {end.link.name_rank(peer)} share GPU {own_gpu}, but the receiver"
                " cannot open memory that the sender has there (the logs of both say why), and NCCL"
                " takes one rank per GPU: let both run in one container, or in containers with one"
                " IPC and PID namespace (docker run --ipc=host --pid=host), or give engines GPUs of"
                " their own (cluster.colocated=false)"
            )


def _log_routes(end: LinkEnd, routes: Mapping[int, Route]) -> None:
    """Log the route to each peer, and why it is not a better one: one line for each reason."""
    assert end.roster is not None, "a rank connects with the roster"
    own = _locate(end.roster, end.rank)
    named: dict[tuple[Route, str], list[str]] = defaultdict(list)
    for peer, route in routes.items():
        their = _locate(end.roster, peer)
        sides = (own, their) if end.is_sender else (their, own)
        named[route, explain_route(*sides, route)].append(end.link.name_rank(peer))
    for (route, why), names in named.items():
        more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
        shown = ", ".join(names[:_MOST_NAMED]) + more
        _log.info("weights take %s between %s and %s%s", route, end.name, shown, why and f": {why}")


def _list_peers(routes: Mapping[int, Route], route: Route) -> list[int]:
    return [peer for peer, chosen in routes.items() if chosen == route]


def _plan_segments(
    routes: Mapping[int, Route],
    shared_words: Mapping[int, int],
    device: torch.device,
    pulls: Collection[int],
) -> dict[int, SegmentSpec]:
    """Return peer -> the segment to share with the peer; messages of `pulls` lie on the host."""
    segments = {}
    for peer, route in routes.items():
        if route == "shared memory" or peer in pulls:
            segments[peer] = SegmentSpec(shared_words[peer], torch.device("cpu"))
        elif route == "shared GPU memory":
            segments[peer] = SegmentSpec(shared_words[peer], device)
    return segments


def _agree_on_writes(end: LinkEnd, plan: RankPlan, peers: Collection[int]) -> DirectWrites:
    """Agree on direct writes with each of `peers`, which share host memory with this rank."""

    def is_writable(peer: int) -> bool:
        theirs = (own for own in plan.buckets if own.peer == peer)
        return all(can_be_written(own.bucket, own.held) for own in theirs)

    servers = {peer: server for peer, server in plan.direct.items() if peer in peers}
    return DirectWrites(end, servers, is_writable)


def _open_channels(end: LinkEnd, segments: Mapping[int, SegmentSpec]) -> dict[int, Channel]:
    """Return the channel to each peer that shares a segment with this rank.

    Left out are peers where GPU memory cannot be opened; both ends leave one another out.
    """
    if not segments:
        return {}
    return serve_segments(end, segments) if end.is_sender else fetch_channels(end, segments)


def plan_slots(
    buckets: Sequence[RankBucket], direct: Collection[int] = ()
) -> tuple[list[slice], dict[int, int]]:
    """Return each bucket's place in the memory shared with its peer, and peer -> its size.

    Both are in int64 words. A peer has up to NUM_SLOTS slots of its largest bucket, used in turns.
    With a peer in `direct`, whose slices are written or pulled directly, only headers and checksums
    are shared, and each bucket has a slot.
    """
    slot_words: dict[int, int] = defaultdict(int)
    for own in buckets:
        slot_words[own.peer] = max(slot_words[own.peer], _count_message_words(own, direct))
    num_seen: Counter[int] = Counter()
    slots = []
    for own in buckets:
        turn = num_seen[own.peer]
        if own.peer not in direct:
            turn %= NUM_SLOTS
        start = turn * slot_words[own.peer]
        slots.append(slice(start, start + _count_message_words(own, direct)))
        num_seen[own.peer] += 1
    shared_words = {}
    for peer, words in slot_words.items():
        num_slots = num_seen[peer] if peer in direct else min(NUM_SLOTS, num_seen[peer])
        shared_words[peer] = num_slots * words
    return slots, shared_words


def _count_message_words(own: RankBucket, direct: Collection[int]) -> int:
    return count_direct_words(own.bucket) if own.peer in direct else own.bucket.num_words
