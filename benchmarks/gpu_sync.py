"""Measures how fast a bucket of a weight sync is packed and placed, beside a copy of as many bytes.

    python benchmarks/gpu_sync.py [--mib 64,256] [--total-mib 4096]

dense   slices are whole tensors, such as experts: rows lie end to end on both sides
rows    slices are columns of wider tensors, as of a tensor-parallel rank: rows of 2 KiB with gaps
odd     as dense, but the tensors begin 8 bytes after a multiple of 16

On a GPU "kernels" are the launches alone, as often as --total-mib asks; "calls" are whole calls,
with the header's and the sums' kernels and the host's check. On a CPU torch moves a bucket of the
smallest size. A byte that is copied counts once, though a copy reads and writes it. The last line
is JSON.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import describe_device, device, has_cuda, synchronize
from mcore_rl.process.clock import now_s
from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.placed_bucket import GpuPass, PlacedBucket, find_holdings
from mcore_rl.weight_sync.verify import ROWS
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice

COLUMNS = 1024
SLICE_ROWS = 1536
"""An expert's matrix of 3 MiB in bfloat16."""
SMALL_ROWS = 16
MIB = 2**20
VERSION = 1
MARGINS = {"dense": (0, 0), "rows": (0, COLUMNS), "odd": (4, 0)}
"""Elements before a tensor's slice, and after each of its rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="64,256", help="sizes of buckets, comma-separated")
    parser.add_argument("--total-mib", type=int, default=4096, help="moved for each figure")
    args = parser.parse_args()
    sizes = [int(size) for size in args.mib.split(",")] if has_cuda() else [1]
    rows = SLICE_ROWS if has_cuda() else SMALL_ROWS
    total_mib = args.total_mib if has_cuda() else max(sizes)
    results: dict[str, Any] = {}
    for mib in sizes:
        times = max(1, total_mib // mib)
        results[f"{mib} MiB"] = {"copy": measure_copy(mib * MIB, times)} | {
            kind: measure_bucket(kind, mib * MIB, rows, times) for kind in MARGINS
        }
        print(f"{mib} MiB, GB/s: {json.dumps(results[f'{mib} MiB'])}")
    print(json.dumps({**describe_device(), "gb_per_s": results}))


def measure_copy(num_bytes: int, times: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), num_bytes, times)


def measure_bucket(kind: str, num_bytes: int, rows: int, times: int) -> dict[str, float]:
    """Return GB/s of packing and placing; the placed bytes are those that were packed."""
    before, after = MARGINS[kind]
    count = max(1, num_bytes // (2 * rows * COLUMNS))
    boxes = [Box(f"w{i}", (0, 0), (rows, COLUMNS)) for i in range(count)]
    [bucket] = plan_buckets({(0, 0): [Slice(b, "bfloat16") for b in boxes]}, 1, 2 * num_bytes)
    stride = COLUMNS + after
    shards = {box.name: [Shard(box, box.name, before, (stride, 1), "bfloat16")] for box in boxes}
    sources, targets = (
        {box.name: make(before + rows * stride) for box in boxes} for make in (draw, clear)
    )
    words_W = torch.zeros(bucket.num_words, dtype=torch.int64, device=device())
    held = find_holdings(bucket, shards)
    packed = PlacedBucket(bucket, words_W, held, sources, sums=ROWS)
    placed = PlacedBucket(bucket, words_W, held, targets, sums=ROWS)
    figures = {
        "pack calls": rate(lambda: packed.pack(VERSION), bucket.num_bytes, times),
        "place calls": rate(lambda: placed.place(VERSION), bucket.num_bytes, times),
    }
    parts = [
        [
            (i, shards[piece.box.name][0].view(tensors), piece.values(words_W))
            for i, piece in enumerate(bucket.pieces)
        ]
        for tensors in (sources, targets)
    ]
    pack, place = (GpuPass.maybe_make(words_W, bucket.pieces, part) for part in parts)
    if pack is not None and place is not None:
        figures |= {
            "pack kernels": rate(pack.pack, bucket.num_bytes, times),
            "place kernels": rate(
                lambda: place.place(VERSION, bucket.index), bucket.num_bytes, times
            ),
        }
    for box in boxes:
        view = shards[box.name][0].view
        assert torch.equal(view(sources), view(targets)), f"{box.name} did not arrive"
    return figures


def draw(num_elements: int) -> Tensor:
    return torch.randn(num_elements, device=device()).bfloat16()


def clear(num_elements: int) -> Tensor:
    return torch.zeros(num_elements, dtype=torch.bfloat16, device=device())


def rate(work: Callable[[], object], num_bytes: int, times: int) -> float:
    """Return GB/s of `work`, which moves `num_bytes`, over so many calls after a first one."""
    work()
    synchronize()
    began_s = now_s()
    for _ in range(times):
        work()
    synchronize()
    return round(num_bytes * times / (now_s() - began_s) / 1e9, 2)


if __name__ == "__main__":
    main()
