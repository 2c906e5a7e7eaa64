"""The policy as a HuggingFace directory: shards of all ranks in, safetensors files out, each written by one
rank.

Peak memory per rank: one file's tensors (`max_file_bytes`) and as much again in send and receive buffers.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.slices.box import Shard
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.carried import write_carried
from mcore_rl.slices.hf.checksums import FileSums
from mcore_rl.slices.hf.files import (
    ExportFile,
    commit_export,
    empty_tensors,
    export_targets,
    plan_export,
    write_export_file,
)
from mcore_rl.slices.plan.whole import SlicePlan, Transfer, make_plan


def export_hf(
    shards: Sequence[Shard],
    tensors: Mapping[str, Tensor],
    hf_config: HfConfig,
    dtype: str,
    out_dir: Path,
    side_files_from: Path,
    max_file_bytes: int = 1 << 30,
) -> None:
    """Write the model to `out_dir` in `dtype`, the model's; collective over all ranks.

    Tokenizer, other small files and tensors that are not trained come from `side_files_from`. The directory
    counts once its index is there.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    held_by: list[list[Shard]] = [[] for _ in range(world_size)]
    dist.all_gather_object(held_by, list(shards))
    family = family_of(hf_config)
    dtypes = family.dtypes(hf_config, dtype)
    files = plan_export(family.shapes(hf_config), dtypes, world_size, max_file_bytes)
    sums: dict[str, FileSums] = {}
    for i in range(0, len(files), world_size):
        plan, targets = _plan_round(held_by, files[i : i + world_size], world_size)
        filled = empty_tensors(targets[rank])
        exchange(plan, rank, tensors, filled)
        for file in files[i : i + world_size]:
            if file.rank == rank:
                sums[file.filename] = write_export_file(out_dir, file, filled)
    sums_of: list[dict[str, FileSums]] = [{} for _ in range(world_size)]
    dist.all_gather_object(sums_of, sums)
    if rank == 0:
        carried = write_carried(side_files_from, out_dir, hf_config, max_file_bytes)
        every = {name: entry for of_rank in sums_of for name, entry in of_rank.items()}
        commit_export(out_dir, files, hf_config, dtype, side_files_from, carried, every)
    dist.barrier()


def _plan_round(
    held_by: Sequence[Sequence[Shard]], files: Sequence[ExportFile], world_size: int
) -> tuple[SlicePlan, list[list[Shard]]]:
    targets = export_targets(files, world_size)
    names = {shard.box.name for shards in targets for shard in shards}
    sources = [[shard for shard in shards if shard.box.name in names] for shards in held_by]
    return make_plan(sources, targets), targets


@torch.no_grad()
def exchange(
    plan: SlicePlan, rank: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    """Carry out this rank's part of a plan between the ranks of the default group, one message per peer."""
    inboxes = []
    for peer, transfers in _by_peer(plan.recvs(rank), "source_rank"):
        buffer = torch.empty(sum(t.num_bytes for t in transfers), dtype=torch.uint8)
        work = None if peer == rank else dist.irecv(buffer, src=peer)
        inboxes.append((peer, work, buffer, transfers))
    sent = []
    for peer, transfers in _by_peer(plan.sends(rank), "target_rank"):
        packed = torch.cat([_bytes_of(t, source) for t in transfers])
        if peer == rank:
            next(buffer for p, _, buffer, _ in inboxes if p == rank).copy_(packed)
        else:
            sent.append((dist.isend(packed, dst=peer), packed))
    for _, work, buffer, transfers in inboxes:
        if work is not None:
            work.wait()
        parts = buffer.split([t.num_bytes for t in transfers])
        for transfer, part in zip(transfers, parts, strict=True):
            view = transfer.target.view(target)
            view.copy_(part.clone().view(view.dtype).view(view.shape))
    for work, _ in sent:
        assert work is not None
        work.wait()


def _by_peer(transfers: Sequence[Transfer], attribute: str) -> list[tuple[int, list[Transfer]]]:
    ordered = sorted(transfers, key=lambda t: getattr(t, attribute))
    return [
        (peer, list(group)) for peer, group in groupby(ordered, key=lambda t: getattr(t, attribute))
    ]


def _bytes_of(transfer: Transfer, source: Mapping[str, Tensor]) -> Tensor:
    dtype = getattr(torch, transfer.target.dtype)
    return transfer.source.view(source).to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
