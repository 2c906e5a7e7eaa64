"""Joins the facts that the ranks of a link publish into one message for all ranks.

rank 0  facts --+                                    +--> rank 0
rank 1  facts --+--> roster: a host per rank,        +--> rank 1
  ...           |    facts where both sides meet   --+      ...

So a rank reads one message, whose size grows with the hosts, not with the ranks' facts. The places
of two ranks decide the route between them (`choose_route`).
"""

import hashlib
import json
import os
import zlib
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.plan.shares import ListedHosts

SOME_GPU = "a GPU"
"""The GPU of a rank that shares no machine with ranks of the other side."""
Route = Literal["shared memory", "shared GPU memory", "NCCL", "gloo"]


@dataclass(frozen=True)
class RankLocation:
    """The place of a rank.

    machine        equal for ranks of one machine
    gpu            id of the GPU that holds the rank's tensors; empty for the host
    readable_gpus  ids of the GPUs whose memory the rank can read
    """

    machine: str
    gpu: str = ""
    readable_gpus: tuple[str, ...] = ()


def choose_route(
    sender: RankLocation, receiver: RankLocation, *, through_hosts: bool = False
) -> Route:
    """Return the best route.

    through_hosts   between machines, messages of GPUs go from host to host
    """
    same_machine = sender.machine == receiver.machine
    if not sender.gpu or not receiver.gpu:
        return "shared memory" if same_machine else "gloo"
    if same_machine and sender.gpu in receiver.readable_gpus:
        return "shared GPU memory"
    return "gloo" if through_hosts and not same_machine else "NCCL"


def explain_route(sender: RankLocation, receiver: RankLocation, route: Route) -> str:
    """Return why the route is not a better one; "" for the best that two ranks can have."""
    same_machine = sender.machine == receiver.machine
    if not same_machine:
        return "another machine"
    if route == "shared memory" and (sender.gpu or receiver.gpu):
        return "one of them is not on a GPU"
    if route != "NCCL":
        return ""
    if sender.gpu in receiver.readable_gpus:
        return "the memory cannot be opened"
    return (
        f"the receiver on GPU {receiver.gpu} cannot read GPU {sender.gpu}: CUDA_VISIBLE_DEVICES"
        " hides it, or the two are no peers"
    )


def needs_gloo(
    senders: Collection[RankLocation],
    receivers: Collection[RankLocation],
    *,
    through_hosts: bool = False,
) -> bool:
    """Return whether any pair uses gloo, whose group all ranks of a link must make together.

    Pass each place once, not each rank: time grows with the product of both numbers.
    """
    return any(
        choose_route(sender, receiver, through_hosts=through_hosts) == "gloo"
        for sender in senders
        for receiver in receivers
    )


def read_machine_id() -> str:
    """Return an id that is equal exactly for processes that can share memory through a channel.

    These processes run on one kernel and see one another's abstract sockets.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


@dataclass(frozen=True)
class RankFacts:
    """The place and abilities of a rank, as the rank publishes them.

    machine         read_machine_id(): equal for processes that can share memory
    sums            kinds of checksums that the rank computes
    gpu             id of the GPU that holds the rank's tensors; empty for the host
    readable_gpus   ids of the GPUs whose memory the rank can read
    memory          name of an engine rank's OpenMemory, empty without
    writes          whether a trainer rank can write into such memory
    """

    machine: str
    sums: tuple[str, ...]
    gpu: str = ""
    readable_gpus: tuple[str, ...] = ()
    memory: str = ""
    writes: bool = False

    def encode(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def decode(data: bytes) -> "RankFacts":
        """Decode facts; cached, as controllers decode the same facts for each engine."""
        machine, sums, gpu, readable, memory, writes = json.loads(data)
        return RankFacts(machine, tuple(sums), gpu, tuple(readable), memory, writes)


@dataclass(frozen=True)
class Runs:
    """Run-length encoded numbers by rank: run i ends before rank `ends[i]`, with `values[i]`."""

    values: tuple[int, ...]
    ends: tuple[int, ...]

    @staticmethod
    def make(numbers: Iterable[int]) -> "Runs":
        runs = [(value, len(list(run))) for value, run in groupby(numbers)]
        ends = accumulate(count for _, count in runs)
        return Runs(tuple(value for value, _ in runs), tuple(ends))

    def __getitem__(self, rank: int) -> int:
        return self.values[bisect_right(self.ends, rank)]

    def expand(self) -> tuple[int, ...]:
        """Return the number of each rank."""
        numbers: list[int] = []
        for value, end in zip(self.values, self.ends, strict=True):
            numbers += [value] * (end - len(numbers))
        return tuple(numbers)

    def encode(self) -> str:
        return b64encode(array("I", self.values + self.ends).tobytes()).decode()

    @staticmethod
    def decode(text: str) -> "Runs":
        numbers = array("I", b64decode(text)).tolist()
        half = len(numbers) // 2
        return Runs(tuple(numbers[:half]), tuple(numbers[half:]))


@dataclass(frozen=True)
class Roster:
    """The ranks of a link, the sending side first.

    hosts   host of each rank, numbered over the link
    on_gpu  whether each rank's tensors are on a GPU
    sums    the kind of checksums of the link
    gloo    whether any pair of ranks uses gloo, whose group all ranks of a link make together
    alike   digest of all inputs of a plan except the layouts: with equal layouts, links with equal
            digests have equal plans
    met     facts, by rank, of the ranks on hosts where ranks of both sides run; only these ranks
            can share memory
    """

    hosts: Runs
    on_gpu: Runs
    sums: str
    gloo: bool
    alike: str
    met: Mapping[int, RankFacts]

    def list_hosts(self, num_senders: int) -> ListedHosts:
        hosts = self.hosts.expand()
        return ListedHosts(hosts[:num_senders], hosts[num_senders:])

    def encode(self) -> bytes:
        met = {rank: facts.encode().decode() for rank, facts in self.met.items()}
        fields = [self.hosts.encode(), self.on_gpu.encode(), self.sums, self.gloo, self.alike, met]
        return zlib.compress(json.dumps(fields).encode(), level=1)

    @staticmethod
    def decode(data: bytes) -> "Roster":
        hosts, on_gpu, sums, gloo, alike, met = json.loads(zlib.decompress(data))
        facts = {int(rank): RankFacts.decode(each.encode()) for rank, each in met.items()}
        return Roster(Runs.decode(hosts), Runs.decode(on_gpu), sums, gloo, alike, facts)


def make_roster(facts: Sequence[RankFacts], link: Link) -> Roster:
    """Return the roster of the ranks of a link, whose facts are in the order of the ranks.

    Raises TransferError if no kind of checksum is common to all ranks.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(f.machine for f in facts))}
    hosts = tuple(numbers[each.machine] for each in facts)
    num_senders = link.num_senders
    both = set(hosts[:num_senders]) & set(hosts[num_senders:])
    met = {rank: each for rank, each in enumerate(facts) if hosts[rank] in both}
    on_gpu = tuple(each.gpu != "" for each in facts)
    places = list(zip(hosts, on_gpu, strict=True))
    gloo = needs_gloo(
        _list_locations(places[:num_senders]),
        _list_locations(places[num_senders:]),
        through_hosts=link.delta == "always",
    )
    sums = _find_common_kind(link.names, [each.sums for each in facts])
    # An engine rank's host matters to the plan only if trainer ranks run there.
    near = [host if host in both else None for host in hosts[num_senders:]]
    alike = hashlib.sha256(repr((hosts[:num_senders], near, sums)).encode()).hexdigest()
    return Roster(Runs.make(hosts), Runs.make(on_gpu), sums, gloo, alike, met)


def _list_locations(places: Iterable[tuple[int, bool]]) -> list[RankLocation]:
    """Return the distinct places of ranks, given (host, whether on a GPU) of each."""
    return [RankLocation(str(host), SOME_GPU if gpu else "") for host, gpu in dict.fromkeys(places)]


def _find_common_kind(names: Sequence[str], kinds: Sequence[Sequence[str]]) -> str:
    """Return the first kind of checksums that all ranks compute.

    Raises TransferError, which names the ranks' kinds, if no kind is common.
    """
    common = set(kinds[0]).intersection(*dict.fromkeys(map(tuple, kinds)))
    for kind in kinds[0]:
        if kind in common:
            return kind
    firsts: dict[tuple[str, ...], str] = {}
    for name, offered in zip(names, kinds, strict=True):
        firsts.setdefault(tuple(offered), name)
    offers = "; ".join(f"{name}: {', '.join(offered)}" for offered, name in firsts.items())
    raise TransferError(
        f"the ranks have no kind of checksum in common ({offers}); run one release of mcore_rl on"
        " trainer and engines"
    )
