"""Syncs of what has changed against whole ones, over a slow link.

    python benchmarks/delta_sync.py              needs root, for network namespaces

Two processes in two network namespaces, whose link passes so many bits a second (tc tbf), send a
tensor of which 1.5 % of the elements change from version to version: whole and by differences in
turns, over gloo as a sync between machines, and by a broadcast of gloo in flat buckets, which is
what an update in SGLang's own way moves. They do so over shared memory, too, with and without
sync.delta, where it must change nothing. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.placed_bucket import RankBucket, find_holdings
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice

NAMES = ("mcore_delta_a", "mcore_delta_b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BUCKET_BYTES = 4 * 2**20
FLAT_BYTES = 512 * 2**20
BROADCAST = "broadcast"
CHANGED = 0.015
DEADLINE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="of weights over the link")
    parser.add_argument("--gbit", default="1,10", help="speeds of the link")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--links", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank is not None:
        run_rank(args)
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for gbit in filter(None, args.gbit.split(",")):
            with limited_link(gbit):
                result[f"{gbit} Gbit/s"] = compare(args, Path(folder) / gbit, NAMES, ADDRESSES[0])
        result["shared memory"] = compare(args, Path(folder) / "shared", None, "127.0.0.1")
    print(json.dumps(result))


@contextmanager
def limited_link(gbit: str) -> Iterator[None]:
    """Have two network namespaces whose link passes so many Gbit/s in each direction."""
    run = subprocess.run
    try:
        for name in NAMES:
            run(["ip", "netns", "add", name], check=True)
        run(
            [
                *["ip", "link", "add", "mcore_a", "netns"],
                NAMES[0],
                *["type", "veth", "peer", "mcore_b"],
                "netns",
                NAMES[1],
            ],
            check=True,
        )
        for name, address, end in zip(NAMES, ADDRESSES, ("mcore_a", "mcore_b"), strict=True):
            inside = ["ip", "netns", "exec", name]
            run([*inside, "ip", "address", "add", f"{address}/24", "dev", end], check=True)
            run([*inside, "ip", "link", "set", end, "up"], check=True)
            run([*inside, "ip", "link", "set", "lo", "up"], check=True)
            limit = f"rate {gbit}gbit burst 1mb latency 50ms".split()
            run([*inside, *f"tc qdisc add dev {end} root tbf".split(), *limit], check=True)
        yield
    finally:
        for name in NAMES:
            run(["ip", "netns", "del", name], check=False)


def compare(
    args: argparse.Namespace, folder: Path, names: tuple[str, str] | None, host: str
) -> dict[str, Any]:
    """Return the median seconds of a sync of both kinds, between two processes."""
    folder.mkdir()
    links = folder / "links.json"
    ranks = []
    for rank in (0, 1):
        inside = [] if names is None else ["ip", "netns", "exec", names[rank]]
        command = [sys.executable, __file__, "--rank", str(rank), "--links", str(links)]
        sizes = ["--mib", str(args.mib), "--repeats", str(args.repeats), "--host", host]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen([*inside, *command, *sizes], stdout=pipe, text=True))
    outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs
    sent, received = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert sent["sum"] == received["sum"], "the receiver has other weights"
    whole, delta = (median(sent["seconds"][way][1:]) for way in ("off", "auto"))
    figures = {"whole_s": whole, "delta_s": delta, "speedup": whole / delta}
    broadcast = median(received["seconds"][BROADCAST][1:])
    figures |= {"broadcast_s": broadcast, "whole_to_broadcast": broadcast / whole}
    figures["bytes_share"] = 1 - received["saved"] / (args.repeats * args.mib * 2**20)
    print(f"{folder.name}: {figures}")
    return figures


def run_rank(args: argparse.Namespace) -> None:
    """Send or receive versions over two links, whole and by differences in turns."""
    numel = args.mib * 2**20 // 2
    shard = Shard(Box("w", (0,), (numel,)), "param", 0, (1,), "bfloat16")
    buckets = plan_buckets({(0, 0): [Slice(shard.box, "bfloat16")]}, 1, BUCKET_BYTES)
    own = [RankBucket(b, 1 - args.rank, find_holdings(b, {"w": [shard]})) for b in buckets]
    stores, links = open_links(args)
    plan = RankPlan("", own, XXH3, {})
    executors = {}
    for way, link in links.items():
        end = LinkEnd.open(link, args.rank, torch.device("cpu"))
        executors[way] = PlanExecutor(end, plan, select_transport)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator).bfloat16()
    sets = {way: {"param": values.clone()} for way in links}
    sets[BROADCAST] = {"param": values.clone()}
    join_broadcast(args)
    seconds: dict[str, list[float]] = {way: [] for way in sets}
    saved = 0
    for version in range(args.repeats + 1):
        at = torch.randint(0, numel, (int(CHANGED * numel),), generator=generator)
        for way, tensors in sets.items():
            if args.rank == 0:
                tensors["param"].view(torch.int16)[at] += 1
            if way == BROADCAST:
                distributed.barrier()
            began_s = time.perf_counter()
            if way == BROADCAST:
                broadcast_flat(tensors["param"])
            else:
                executors[way].execute(version, tensors, time.monotonic() + DEADLINE_S)
                saved += executors[way].take_saved()
            seconds[way].append(time.perf_counter() - began_s)
    total = {way: int(s["param"].view(torch.int16).long().sum()) for way, s in sets.items()}
    print(json.dumps({"seconds": seconds, "saved": saved, "sum": total}))
    del stores


def join_broadcast(args: argparse.Namespace) -> None:
    """Form a group of gloo that meets in the folder both ranks see and talks over the link."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(args.host)
    distributed.init_process_group(
        "gloo",
        f"file://{args.links.with_suffix('.group')}",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE_S),
    )


def interface_of(host: str) -> str:
    """Return the name of this rank's network interface to the other rank."""
    return (
        "lo" if host == "127.0.0.1" else next(n for n in os.listdir("/sys/class/net") if n != "lo")
    )


def broadcast_flat(values: torch.Tensor) -> None:
    """Broadcast by buckets of FLAT_BYTES, each copied into one tensor and out of it."""
    for part in values.view(torch.uint8).split(FLAT_BYTES):
        flat = part.clone()
        distributed.broadcast(flat, 0)
        part.copy_(flat)


def open_links(args: argparse.Namespace) -> tuple[list[LinkStore], dict[str, Link]]:
    """Return a link of each kind; the sender serves their stores, and leaves them in a file."""
    if args.rank == 0:
        stores, links = [], {}
        for way in ("off", "auto"):
            stores.append(LinkStore.serve(args.host, DEADLINE_S))
            store = stores[-1]
            made = Link("engine", args.host, store.port, store.key, 1, 1, BUCKET_BYTES, DEADLINE_S)
            links[way] = replace(made, delta=way)
            store.keep(links[way])
        unfinished = args.links.with_suffix(".part")
        unfinished.write_text(json.dumps({way: asdict(link) for way, link in links.items()}))
        unfinished.rename(args.links)
        return stores, links
    until_s = time.monotonic() + DEADLINE_S
    while not args.links.exists():
        assert time.monotonic() < until_s, "the sender left no links"
        time.sleep(0.05)
    return [], {way: Link(**fields) for way, fields in json.loads(args.links.read_text()).items()}


if __name__ == "__main__":
    main()
