"""How the ranks of a link come to one plan: each knows all layouts, plans its own part, and pairs compare.

trainer rank: its shards -+                          +-> what I send, to whom  --+
                          +-> layouts of both sides -+                           +-> equal in every pair?
engine rank:  its trace  -+                          +-> what I get, from whom --+
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.local_plan import plan_recvs, plan_sends
from mcore_rl.slices.pool import Slice
from mcore_rl.slices.shares import RegularHosts
from mcore_rl.stream.buckets import Bucket, plan_buckets
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import TransferError
from mcore_rl.stream.wire import Link, decode_shards, encode_shards

Layouts = Sequence[tuple[Shard, ...]]
MakeShards = Callable[[Layouts], Sequence[Shard]]
"""A rank's own layout; an engine rank's needs the layouts of the trainer ranks."""


@dataclass(frozen=True)
class Agreement:
    """What one rank needs to know.

    digest    sha256 of the layouts of all ranks: equal on all of them
    shards    this rank's own, by HF name
    """

    digest: str
    buckets: list[Bucket]
    shards: Mapping[str, Sequence[Shard]]


def agree(store: LinkStore, link: Link, rank: int, make_shards: MakeShards, deadline_s: float) -> Agreement:
    """All ranks of the link call this; TransferError names those that did not come, failed or disagree."""
    layouts, digest = _exchange_layouts(store, link, rank, make_shards, deadline_s)
    flows = _plan(store, link, rank, layouts, deadline_s)
    own: dict[str, list[Shard]] = defaultdict(list)
    for shard in layouts[rank]:
        own[shard.box.name].append(shard)
    return Agreement(digest, plan_buckets(flows, link.num_receivers, link.bucket_bytes), own)


def _exchange_layouts(
    store: LinkStore, link: Link, rank: int, make_shards: MakeShards, deadline_s: float
) -> tuple[Layouts, str]:
    names, senders = link.names, range(link.num_senders)
    with store.errors_published("layout", rank):
        sources = [] if rank in senders else store.collect("layout", senders, names, names[rank], deadline_s)
        store.publish("layout", rank, encode_shards(make_shards([decode_shards(data) for data in sources])))
    encoded = store.collect("layout", range(len(names)), names, names[rank], deadline_s)
    digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in encoded)).hexdigest()
    return [decode_shards(data) for data in encoded], digest


def _plan(
    store: LinkStore, link: Link, rank: int, layouts: Layouts, deadline_s: float
) -> dict[tuple[int, int], Iterator[Slice]]:
    """(source rank, target rank) -> slices, of the pairs that this rank is part of."""
    num_senders = link.num_senders
    with store.errors_published("plan", rank):
        source, target = ListedLayout(layouts[:num_senders]), ListedLayout(layouts[num_senders:])
        hosts = RegularHosts(num_senders, link.num_receivers, 1)
        if rank < num_senders:
            planned = plan_sends(rank, source, target, hosts, relay=False)
            flows = {num_senders + flow.peer: flow for flow in planned}
        else:
            planned = plan_recvs(rank - num_senders, source, target, hosts, relay=False).recvs
            flows = {flow.peer: flow for flow in planned}
        digests = {peer: flow.digest for peer, flow in flows.items()}
        store.publish("plan", rank, json.dumps(digests).encode())
    _compare(store, link, rank, digests, deadline_s)
    pairs = {tuple(sorted((rank, peer))): flow for peer, flow in flows.items()}
    return {(sender, receiver - num_senders): f.slices for (sender, receiver), f in pairs.items()}


def _compare(store: LinkStore, link: Link, rank: int, digests: Mapping[int, str], deadline_s: float) -> None:
    peers = sorted(digests)
    answers = store.collect("plan", peers, link.names, link.names[rank], deadline_s)
    for peer, answer in zip(peers, answers, strict=True):
        theirs = json.loads(answer).get(str(rank))
        if theirs != digests[peer]:
            raise TransferError(
                f"{link.names[rank]} and {link.names[peer]} planned otherwise: {digests[peer]}, {theirs}"
            )
