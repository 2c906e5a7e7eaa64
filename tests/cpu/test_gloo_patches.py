"""The patches of collectives over gloo: results are right, and without a patch they are not."""

import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.cpu import megatron_patches
from tests.support.distributed import join_gloo, run_ranks
from tests.support.upstream import assert_defect


def send_strided(
    rank: int, world_size: int, port: int, patched: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank gets of a broadcast and a scatter of transposed tensors."""
    if patched:
        megatron_patches.contiguous_collectives()
    join_gloo(rank, world_size, port)
    strided = torch.arange(6.0).view(2, 3).t()
    broadcast = strided if rank == 0 else torch.zeros(3, 2)
    dist.broadcast(broadcast, 0)
    scattered = torch.zeros(3, 2)
    dist.scatter(scattered, [strided, strided] if rank == 0 else None, 0)
    return broadcast, scattered


@pytest.mark.gloo
def test_contiguous_collectives() -> None:
    wanted = torch.arange(6.0).view(2, 3).t()
    assert all(torch.equal(got, wanted) for got in run_ranks(send_strided, 2, True)[1])
    unpatched = run_ranks(send_strided, 2, False)[1]
    wrong = not any(torch.equal(got, wanted) for got in unpatched)
    assert_defect("megatron_patches.contiguous_collectives", wrong)


SHARD = 1 << 20
"""Elements of a rank's part of a bucket."""
PAGES = 4 * SHARD // resource.getpagesize()


def sync_bucket(
    rank: int, world_size: int, port: int, patched: bool, is_async: bool
) -> dict[str, Any]:
    """Sum gradients and gather weights as megatron-core does; return both and the new pages."""
    from megatron.core.distributed import param_and_grad_buffer as megatron

    if patched:
        megatron_patches.buckets_in_place()
    join_gloo(rank, world_size, port)
    group = dist.group.WORLD
    gradients = torch.arange(world_size * SHARD) % 100 + 10.0 * rank
    weights = torch.full((world_size * SHARD,), float(rank))
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with megatron._coalescing_manager(group, async_ops=is_async) as works:
        options = {"group": group, "async_op": is_async}
        megatron.dist_reduce_scatter_func(
            gradients[own], gradients, op=dist.ReduceOp.SUM, **options
        )
    if is_async:
        works.wait()
    with megatron._coalescing_manager(group, async_ops=is_async) as works:
        megatron.dist_all_gather_func(weights, weights[own], **options)
    if is_async:
        works.wait()
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"gradients": gradients[own], "weights": weights, "pages": pages}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world_size", "is_async"),
    [
        (1, False),
        (3, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
    ],
)
def test_buckets_in_place(world_size: int, is_async: bool) -> None:
    plain = run_ranks(sync_bucket, world_size, False, is_async)
    for rank, got in enumerate(run_ranks(sync_bucket, world_size, True, is_async)):
        assert torch.equal(got["gradients"], plain[rank]["gradients"])
        wanted = torch.arange(float(world_size)).repeat_interleave(SHARD)
        assert torch.equal(got["weights"], wanted)
        print(f"{got['pages']} new pages, {plain[rank]['pages']} without the patch")
        assert got["pages"] < PAGES
    wasted = plain[0]["pages"] > 2 * world_size * PAGES
    assert_defect("megatron_patches.buckets_in_place", wasted)


def test_other_collectives_of_a_block_are_still_carried_out() -> None:
    assert run_ranks(sum_in_a_block, 2) == [[3.0, 3.0], [3.0, 3.0]]


def sum_in_a_block(rank: int, world_size: int, port: int) -> list[float]:
    """Return two sums over ranks, waited for by the block and by its caller."""
    from megatron.core.distributed import param_and_grad_buffer as megatron

    megatron_patches.buckets_in_place()
    join_gloo(rank, world_size, port)
    sums = []
    for is_async in (False, True):
        value = torch.tensor([rank + 1.0])
        with megatron._coalescing_manager(dist.group.WORLD, async_ops=is_async) as works:
            dist.all_reduce(value, async_op=is_async)
        if is_async:
            works.wait()
        sums.append(value.item())
    return sums
