"""Which way bytes go between two ranks, by what both say of where they are.

                      one machine                                        two machines
host to host          shared memory                                      gloo
GPU to GPU            sender's GPU memory, if the receiver can read it;  NCCL
                      else NCCL
GPU and host          as host to host, with a copy per bucket at the GPU's end
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream, gpu_id, readable_gpus
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.channel import Channel, SegmentServer, SegmentSpec, fetch, machine_id
from mcore_rl.stream.routes.gloo import GlooTransport, route_to
from mcore_rl.stream.routes.gpu_pairs import GpuPairTransport
from mcore_rl.stream.routes.shared_memory import SharedMemoryTransport
from mcore_rl.stream.routes.transport import Transport
from mcore_rl.stream.wire import Link

MakeTransport = Callable[[LinkStore, int, Link, Mapping[int, int], float, DeviceStream], Transport]
"""(store, rank, link, peer -> int64 words of memory to share with it, deadline, stream that packs and places
messages) -> transport.
"""

Way = Literal["shared memory", "shared GPU memory", "NCCL", "gloo"]


@dataclass(frozen=True)
class RankLocation:
    """What a rank tells the others of its link about itself."""

    machine: str
    gpu: str = ""
    """Where its tensors are; empty for the host."""
    readable_gpus: tuple[str, ...] = ()
    door: str = ""
    """Where receivers of its machine fetch what they share with it."""


def choose_way(sender: RankLocation, receiver: RankLocation) -> Way:
    is_near = sender.machine == receiver.machine
    if sender.gpu and receiver.gpu:
        return "shared GPU memory" if is_near and sender.gpu in receiver.readable_gpus else "NCCL"
    return "shared memory" if is_near else "gloo"


class Routes:
    """The transport of one rank: each peer's messages take that peer's way."""

    def __init__(self, transports: Sequence[Transport], by_peer: Mapping[int, Transport]) -> None:
        self._transports, self._by_peer = transports, by_peer
        self._started: list[Transport] = []
        """Which way each message went that may be unfinished."""

    def memory(self, peer: int) -> Tensor | None:
        return self._by_peer[peer].memory(peer)

    def device(self, peer: int) -> torch.device:
        return self._by_peer[peer].device(peer)

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].send(tensor_u8, peer, what)

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._started.append(self._by_peer[peer])
        self._started[-1].recv(tensor_u8, peer, what)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        for (
            transport
        ) in self._transports:  # peers hear at once that what came before may be overwritten
            transport.run(deadline_s, failure, self._started.count(transport))
        while len(self._started) > pending:
            oldest = self._started.pop(0)
            oldest.run(deadline_s, failure, self._started.count(oldest))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def make_routes(
    store: LinkStore,
    rank: int,
    link: Link,
    sizes: Mapping[int, int],
    deadline_s: float,
    stream: DeviceStream,
) -> Routes:
    """All ranks of the link call this; TransferError names those that did not by `deadline_s`."""
    doorstep = SegmentServer() if rank < link.num_senders else None
    with store.errors_published("host", rank):
        device = stream.device
        own = RankLocation(
            machine_id(), gpu_id(device), readable_gpus(device), doorstep.name if doorstep else ""
        )
        store.publish("host", rank, json.dumps(astuple(own)).encode())
    everyone = range(len(link.names))
    answers = store.collect("host", everyone, link.names, link.names[rank], deadline_s)
    places = [_decode_place(answer) for answer in answers]
    if doorstep is not None:
        ways = {peer: choose_way(places[rank], places[peer]) for peer in sizes}
    else:
        ways = {peer: choose_way(places[peer], places[rank]) for peer in sizes}
    rooms = {
        peer: SegmentSpec(
            words, device if ways[peer] == "shared GPU memory" else torch.device("cpu")
        )
        for peer, words in sizes.items()
        if ways[peer] in ("shared memory", "shared GPU memory")
    }
    if doorstep is not None:
        channels = doorstep.serve(rooms, link.names, link.names[rank], deadline_s)
    else:
        channels = _fetch_all(rooms, places, rank, link, deadline_s)
    near = SharedMemoryTransport(rank, link.names, channels, stream)
    transports: list[Transport] = [near]
    by_peer: dict[int, Transport] = dict.fromkeys(rooms, near)
    if needs_gloo(places[: link.num_senders], places[link.num_senders :]):
        transports.append(_make_gloo(store, rank, link))
        by_peer |= dict.fromkeys((peer for peer in sizes if ways[peer] == "gloo"), transports[-1])
    far_gpus = [peer for peer in sizes if ways[peer] == "NCCL"]
    if far_gpus:
        transports.append(GpuPairTransport(store, rank, link, far_gpus, device, deadline_s))
        by_peer |= dict.fromkeys(far_gpus, transports[-1])
    return Routes(transports, by_peer)


def make_gloo(
    store: LinkStore,
    rank: int,
    link: Link,
    sizes: Mapping[int, int],
    deadline_s: float,
    stream: DeviceStream,
) -> GlooTransport:
    """Gloo between all ranks, wherever they run."""
    return _make_gloo(store, rank, link)


def make_gpu_pairs(
    store: LinkStore,
    rank: int,
    link: Link,
    sizes: Mapping[int, int],
    deadline_s: float,
    stream: DeviceStream,
) -> GpuPairTransport:
    """NCCL between all ranks, each on a GPU of its own."""
    return GpuPairTransport(store, rank, link, sizes, stream.device, deadline_s)


def _decode_place(data: bytes) -> RankLocation:
    machine, gpu, readable, door = json.loads(data)
    return RankLocation(machine, gpu, tuple(readable), door)


def _fetch_all(
    rooms: Mapping[int, SegmentSpec],
    places: Sequence[RankLocation],
    rank: int,
    link: Link,
    deadline_s: float,
) -> dict[int, Channel]:
    return {
        peer: fetch(places[peer].door, rank, room, link.names[peer], deadline_s)
        for peer, room in rooms.items()
    }


def needs_gloo(senders: Sequence[RankLocation], receivers: Sequence[RankLocation]) -> bool:
    """Whether any pair goes by gloo, whose group all ranks of a link make together."""
    kinds = [
        {RankLocation(p.machine, p.gpu and "any") for p in places}
        for places in (senders, receivers)
    ]
    return any(
        choose_way(sender, receiver) == "gloo" for sender in kinds[0] for receiver in kinds[1]
    )


def _make_gloo(store: LinkStore, rank: int, link: Link) -> GlooTransport:
    tcp_store: Any = store.tcp_store
    local_host = route_to(link.store_host, link.store_port)
    return GlooTransport(tcp_store, rank, link.names, local_host, link.timeout_s)
