"""Has engine ranks read slices from the GPU memory of trainer ranks on the same machine.

trainer rank: Offers                                      engine rank: Access
waits for its own work, tells where slices lie --offer--> opens the storages
sums its slices                                           copies and sums, closes the storages
header and checksums ----------------message------------> compared
frees or changes the storages <----------read------------ done

So each byte is read twice and written once, where a bucket is read three times and written twice;
there is no memory for buckets, and one kernel moves a version. The storages' handles travel with
each version, because storages move when ranks give up their memory.
"""

import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device import gpu_ipc
from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.device.pull_kernels import PullRows, PullTable
from mcore_rl.weight_sync.link_end import (
    NUM_SETS,
    LinkEnd,
    RankServer,
    connect,
    recv_table,
    send_table,
)
from mcore_rl.weight_sync.placed_bucket import BucketEnd, RankBucket
from mcore_rl.weight_sync.pulled_bucket import (
    HeldRows,
    PulledBucket,
    Sources,
    Storages,
    join_rows,
    make_sum_rows,
)
from mcore_rl.weight_sync.transports.host.direct import can_be_written
from mcore_rl.weight_sync.transports.shared_memory import (
    Channel,
    SharedMemoryTransport,
    make_server_name,
)
from mcore_rl.weight_sync.transports.transport import Failure
from mcore_rl.weight_sync.verify import ROWS, make_row_multipliers
from mcore_rl.weight_sync.waits import TransferError

_OFFER = struct.Struct("qqqq")
"""Version, number of the set of tensors, storages, slices of the table; 0 slices: none follows."""
_HANDLE = struct.Struct("64sq")
"""A storage's handle, and its offset in the allocation that the handle opens."""
_PURPOSE = "ask for its storages"

Peers = dict[int, socket.socket]


def agree_on_pulls(
    end: LinkEnd, buckets: Sequence[RankBucket], candidates: Collection[int]
) -> Peers:
    """Return the candidates with whom slices are pulled, and a socket to each.

    A pair pulls if the trainer rank can export its memory, and each side has the slices as rows of
    the bytes that travel: those that are cast or quantized travel in buckets. Raises TransferError,
    which names a rank that does not answer by end.deadline_s.
    """
    is_able = gpu_ipc.can_export if end.is_sender else gpu_ipc.can_open
    own = dict.fromkeys(candidates, is_able(end.device)) if candidates else {}
    for bucket in buckets:
        if bucket.peer in own:
            own[bucket.peer] &= can_be_written(bucket.bucket, bucket.held)
    sockets = dict(_meet(end, candidates)) if candidates else {}
    agreed = {}
    for peer, connection in sockets.items():
        if _exchange(end, peer, connection, can_pull=own[peer]):
            agreed[peer] = connection
        else:
            connection.close()
    return agreed


def _meet(end: LinkEnd, candidates: Collection[int]) -> Iterable[tuple[int, socket.socket]]:
    """Yield each candidate and the socket to it: trainer ranks listen, engine ranks connect."""
    if end.is_sender:
        server = RankServer(make_server_name(end, end.rank, "storages"))
        yield from server.accept(end, candidates, _PURPOSE)
        return
    for peer in candidates:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connect(connection, end, make_server_name(end, peer, "storages"), comes_later=True)
        except OSError as error:
            connection.close()
            name = end.link.name_rank(peer)
            raise TransferError(f"no storages of {name}: {error}", peer_lost=True) from error
        yield peer, connection


def _exchange(end: LinkEnd, peer: int, connection: socket.socket, *, can_pull: bool) -> bool:
    """Tell the peer whether this rank can pull; return whether both can."""
    connection.settimeout(max(0.001, end.deadline_s - time.monotonic()))
    try:
        connection.sendall(bytes([can_pull]))
        answer = connection.recv(1)
        if not answer:
            raise ConnectionResetError("the process is gone")
    except OSError as error:
        connection.close()
        name = end.link.name_rank(peer)
        raise TransferError(f"no storages of {name}: {error}", peer_lost=True) from error
    return can_pull and bool(answer[0])


@dataclass(frozen=True)
class Offer:
    """Where a peer's storages lie in a version.

    handles  (handle of an allocation, offset of the storage in it)
    number   of the peer's set of tensors, to which `slices` belong
    slices   the parts of each slice in those storages
    """

    handles: Sequence[tuple[bytes, int]]
    number: int
    slices: Sequence[Sequence[HeldRows]]


class Offers:
    """A trainer rank's end: tells one engine rank where its slices lie."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._known: list[int] = []
        """Sets whose tables the peer has."""

    def offer(
        self,
        version: int,
        number: int,
        handles: Sequence[tuple[bytes, int]],
        slices: Sequence[Sequence[HeldRows]],
    ) -> None:
        """Let the peer read `version` from set `number` of tensors."""
        data = b"".join(_HANDLE.pack(*each) for each in handles)
        num_slices = 0
        if number not in self._known:
            self._known = [*self._known[1 - NUM_SETS :], number]
            sources = Sources.join(slices)
            num_slices = len(sources.counts)
            data += sources.counts.tobytes() + sources.parts.tobytes()
        message = _OFFER.pack(version, number, len(handles), num_slices)
        send_table(self._connection, message, data, "mcore_rl_sources")

    def close(self) -> None:
        self._connection.close()


class Access:
    """An engine rank's end: what one trainer rank offers."""

    def __init__(self, end: LinkEnd, peer: int, connection: socket.socket) -> None:
        self._end = end
        self._peer = peer
        self._connection = connection
        self._tables: dict[int, list[list[HeldRows]]] = {}

    def wait(self, version: int, deadline_s: float, failure: Failure) -> Offer:
        """Return the offer of `version`.

        Raises TransferError as Transport.run does, or if the offer is of another version.
        """
        name = self._end.link.name_rank(self._peer)
        what = f"{name} to say where version {version} lies"
        data, table = recv_table(
            self._end, self._connection, _OFFER.size, what, deadline_s, failure
        )
        offered, number, num_storages, num_slices = _OFFER.unpack(data)
        handles_bytes = num_storages * _HANDLE.size
        if num_slices:
            self._tables = dict([*self._tables.items()][1 - NUM_SETS :])
            self._tables[number] = _decode(table[handles_bytes:], num_slices)
        if offered != version:
            raise TransferError(f"{name} offers version {offered}, not version {version}")
        handles = [*_HANDLE.iter_unpack(table[:handles_bytes])]
        return Offer(handles, number, self._tables[number])

    def close(self) -> None:
        self._connection.close()


def _decode(table: bytes, num_slices: int) -> list[list[HeldRows]]:
    numbers = np.frombuffer(table, np.int64)
    parts = numbers[num_slices:].reshape(-1, len(HeldRows._fields))
    return [*Sources(numbers[:num_slices], parts).split()]


class PullTransport(SharedMemoryTransport):
    """Messages have only header and checksums; slices are read from the trainer's storages."""

    def __init__(
        self,
        end: LinkEnd,
        channels: Mapping[int, Channel],
        stream: DeviceStream,
        slots: Sequence[slice],
        peers: Peers,
    ) -> None:
        """Make the transport to `peers`, over their `channels` and `slots`."""
        super().__init__(end, channels, stream, slots)
        self._offers = {peer: Offers(each) for peer, each in peers.items() if end.is_sender}
        self._access = {
            peer: Access(end, peer, each) for peer, each in peers.items() if not end.is_sender
        }
        self._storages = Storages()
        self._tables: dict[tuple[int, ...], PullTable] = {}
        """By the numbers of all sets of tensors that the rows lead to."""

    @property
    def num_ahead(self) -> int:
        return sys.maxsize  # Each message has a slot of its own.

    @property
    def moves_with_storages(self) -> bool:
        return self._end.is_sender

    def needs_scratch(self, peer: int) -> bool:
        return False

    def bind(
        self,
        own: RankBucket,
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        scratch_W: Tensor,
        sums: str,
    ) -> PulledBucket:
        assert sums == ROWS, f"checksums of kind {sums} are not taken while slices are pulled"
        storages = self._storages if self._end.is_sender else None
        return PulledBucket(own.bucket, own.held, tensors, message_W, storages)

    def begin(
        self,
        version: int,
        set_number: int,
        buckets: Sequence[tuple[int, BucketEnd]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        """Offer and sum the slices of `version`, or wait for the offers and pull the slices."""
        pulled = [(peer, each) for peer, each in buckets if isinstance(each, PulledBucket)]
        if self._end.is_sender:
            sums_P = self._sum(version, set_number, pulled)
        else:
            offers = {
                peer: self._access[peer].wait(version, deadline_s, failure)
                for peer in dict.fromkeys(peer for peer, _ in pulled)
            }
            sums_P = self._pull(set_number, pulled, offers)
        ends = np.cumsum([len(each.slices) for _, each in pulled]).tolist()
        for (_, bucket), stop in zip(pulled, ends, strict=True):
            bucket.computed_P = sums_P[stop - len(bucket.slices) : stop]

    def close(self) -> None:
        for end in (*self._offers.values(), *self._access.values()):
            end.close()
        super().close()

    def _sum(
        self, version: int, number: int, buckets: Sequence[tuple[int, PulledBucket]]
    ) -> Tensor:
        """Offer the slices to their peers; return their checksums on the host.

        Raises TransferError if a storage has no memory that CUDA exports.
        """
        addresses = self._storages.addresses
        try:
            handles = [gpu_ipc.export_memory(address) for address in addresses]
        except RuntimeError as error:
            message = f"{self._end.name} cannot open its memory to engines: {error}"
            raise TransferError(message) from error
        self._stream.synchronize()
        for peer, offers in self._offers.items():
            slices = [part for to, each in buckets if to == peer for part in each.slices]
            offers.offer(version, number, handles, slices)
        slices = [part for _, each in buckets for part in each.slices]
        table = self._find_table((number,), len(slices), lambda: make_sum_rows(slices))
        return table.run(addresses).cpu()

    def _pull(
        self,
        number: int,
        buckets: Sequence[tuple[int, PulledBucket]],
        offers: Mapping[int, Offer],
    ) -> Tensor:
        """Copy the slices into this rank's tensors; return their checksums on the host."""
        slices = [part for _, each in buckets for part in each.slices]
        numbers = chain.from_iterable((peer, each.number) for peer, each in offers.items())
        table = self._find_table(
            (number, *numbers),
            len(slices),
            lambda: join_rows(_order_sources(buckets, offers), slices),
        )
        handles = [each for offer in offers.values() for each in offer.handles]
        with _open_all(handles, self._stream.device) as bases:
            return table.run(bases).cpu()

    def _find_table(
        self, key: tuple[int, ...], num_slices: int, list_rows: Callable[[], Iterable[PullRows]]
    ) -> PullTable:
        """Return the table of the sets of tensors in `key`; those used last are kept."""
        if key not in self._tables:
            multipliers_W = make_row_multipliers(self._stream.device)
            copying = not self._end.is_sender
            table = PullTable(list_rows(), num_slices, multipliers_W, copying=copying)
            self._tables = dict([*self._tables.items()][1 - NUM_SETS :])
            self._tables[key] = table
        return self._tables[key]


def _order_sources(
    buckets: Sequence[tuple[int, PulledBucket]], offers: Mapping[int, Offer]
) -> Iterator[list[HeldRows]]:
    """Yield each slice's parts on its trainer rank, in the order of the buckets.

    Storages are numbered over all offers.
    """
    slices: dict[int, Iterator[list[HeldRows]]] = {}
    num_storages = 0
    for peer, offer in offers.items():
        slices[peer] = _number_from(num_storages, offer.slices)
        num_storages += len(offer.handles)
    for peer, bucket in buckets:
        yield from islice(slices[peer], len(bucket.slices))


def _number_from(first: int, slices: Iterable[Sequence[HeldRows]]) -> Iterator[list[HeldRows]]:
    for parts in slices:
        yield [part._replace(storage=first + part.storage) for part in parts]


@contextmanager
def _open_all(handles: Sequence[tuple[bytes, int]], device: torch.device) -> Iterator[list[int]]:
    """Open the allocations for the block; give the address of each storage in them.

    Raises TransferError if the driver does not open one.
    """
    opened: dict[bytes, int] = {}
    try:
        for handle, _ in handles:
            if handle not in opened:
                opened[handle] = gpu_ipc.open_memory(handle, device)
        yield [opened[handle] + offset for handle, offset in handles]
    except RuntimeError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"memory of a trainer rank cannot be read: {error}") from error
    finally:
        for address in opened.values():
            gpu_ipc.close_memory(address, device)
