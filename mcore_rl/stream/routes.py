"""Which way bytes go between two ranks: shared memory on one machine, gloo between machines."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mcore_rl.stream.gloo import GlooTransport, route_to
from mcore_rl.stream.shared_memory import Doorstep, SharedMemoryTransport, fetch, machine_id
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import Transport
from mcore_rl.stream.wire import Link

MakeTransport = Callable[[LinkStore, int, Link, Mapping[int, int], float], Transport]
"""(store, rank, link, peer -> int64 words of memory to share with it, deadline) -> transport."""


class Routes:
    """The transport of one rank: each peer's messages take that peer's way."""

    def __init__(
        self, near: SharedMemoryTransport, near_peers: frozenset[int], far: Transport | None
    ) -> None:
        self._near, self._near_peers, self._far = near, near_peers, far
        self._started: list[Transport] = []
        """Which way each message went that may be unfinished."""

    def memory(self, peer: int) -> Tensor | None:
        return self._to(peer).memory(peer)

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._started.append(self._to(peer))
        self._started[-1].send(tensor_u8, peer, what)

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        self._started.append(self._to(peer))
        self._started[-1].recv(tensor_u8, peer, what)

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        self._near.run(deadline_s, failure, self._started.count(self._near))
        while len(self._started) > pending:
            oldest = self._started.pop(0)
            oldest.run(deadline_s, failure, self._started.count(oldest))

    def close(self) -> None:
        self._near.close()
        if self._far is not None:
            self._far.close()

    def _to(self, peer: int) -> Transport:
        if peer in self._near_peers:
            return self._near
        assert self._far is not None, f"no way to rank {peer}"
        return self._far


def make_routes(
    store: LinkStore, rank: int, link: Link, sizes: Mapping[int, int], deadline_s: float
) -> Routes:
    """All ranks of the link call this; TransferError names those that did not by `deadline_s`."""
    is_sender = rank < link.num_senders
    doorstep = Doorstep() if is_sender else None
    own = f"{machine_id()}\n{doorstep.name if doorstep else ''}"
    with store.errors_published("host", rank):
        store.publish("host", rank, own.encode())
    everyone = range(len(link.names))
    answers = store.collect("host", everyone, link.names, link.names[rank], deadline_s)
    machines, doors = zip(*(answer.decode().split("\n") for answer in answers), strict=True)
    near = {peer: words for peer, words in sizes.items() if machines[peer] == machines[rank]}
    if doorstep is not None:
        channels = doorstep.serve(near, link.names, link.names[rank], deadline_s)
    else:
        channels = {
            peer: fetch(doors[peer], rank, words, link.names[peer], deadline_s)
            for peer, words in near.items()
        }
    far = None if len(set(machines)) == 1 else _make_far(store, rank, link)
    return Routes(SharedMemoryTransport(rank, link.names, channels), frozenset(near), far)


def make_gloo(
    store: LinkStore, rank: int, link: Link, sizes: Mapping[int, int], deadline_s: float
) -> GlooTransport:
    """Gloo between all ranks, wherever they run."""
    return _make_far(store, rank, link)


def _make_far(store: LinkStore, rank: int, link: Link) -> GlooTransport:
    tcp_store: Any = store.tcp_store
    local_host = route_to(link.store_host, link.store_port)
    return GlooTransport(tcp_store, rank, link.names, local_host, link.timeout_s)
