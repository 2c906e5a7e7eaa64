"""Writes the shards of all ranks to a HuggingFace directory; each file is written by one rank.

Peak memory per rank: one file's tensors (`max_file_bytes`), and as much again in send and receive
buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.process.disk import report_full_disk
from mcore_rl.train.storage import SHARED, Storage
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.checksums import FileSums
from mcore_rl.weights.hf.config import without_trained_mtp
from mcore_rl.weights.hf.files import (
    ExportFile,
    commit_export,
    list_carried_tensors,
    list_export_targets,
    make_empty_tensors,
    plan_export,
    write_carried,
    write_export_file,
)
from mcore_rl.weights.hf.folder import TEMPORARY
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.plan.whole import SlicePlan, Transfer, make_plan

T = TypeVar("T")


def export_hf(
    shards: Sequence[Shard],
    tensors: Mapping[str, Tensor],
    hf_config: HfConfig,
    dtype: str,
    out_dir: Path,
    side_files_from: Path,
    max_file_bytes: int = 1 << 30,
    storage: Storage = SHARED,
) -> None:
    """Write the model to `out_dir`; collective over all ranks.

    dtype             of the model
    side_files_from   directory with tokenizer, other small files, and tensors that are not trained
    storage           where `out_dir` is; its functions read `side_files_from` there
    The directory is complete once it has its index. Raises DiskFullError with the file that did
    not fit.
    """
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    family = family_of(hf_config)
    copies = _find_copies(hf_config, side_files_from, storage)
    held_by: list[list[Shard]] = [[] for _ in range(world_size)]
    dist.all_gather_object(held_by, [*shards, *_copy_shards(shards, copies)])
    shapes = _add_copies(family.shapes(hf_config), copies)
    dtypes = _add_copies(family.dtypes(hf_config, dtype), copies)
    files = plan_export(shapes, dtypes, world_size, max_file_bytes)
    sums: dict[str, FileSums] = {}
    for i in range(0, len(files), world_size):
        plan, targets = _plan_round(held_by, files[i : i + world_size], world_size)
        filled = make_empty_tensors(targets[rank])
        exchange(plan, rank, tensors, filled)
        for file in files[i : i + world_size]:
            if file.rank == rank:
                with report_full_disk(out_dir / file.filename):
                    sums[file.filename] = write_export_file(out_dir, file, filled)
                    storage.bring(out_dir / (file.filename + TEMPORARY))
    sums_by_rank: list[dict[str, FileSums]] = [{} for _ in range(world_size)]
    dist.all_gather_object(sums_by_rank, sums)
    if rank == 0:
        all_sums: dict[str, FileSums] = {}
        for rank_sums in sums_by_rank:
            all_sums |= rank_sums
        with report_full_disk(out_dir):
            places = (side_files_from, out_dir, hf_config, max_file_bytes, set(copies))
            carried = storage.run(write_carried, *places)
            names = (out_dir, files, without_trained_mtp(hf_config), dtype, side_files_from)
            storage.run(commit_export, *names, carried, all_sums)
    dist.barrier()
    storage.leave(out_dir)


def _find_copies(hf_config: HfConfig, source: Path, storage: Storage) -> dict[str, str]:
    """Return HF name -> original of the tensors that the source has twice; a collective."""
    family = family_of(hf_config)
    possible = family.copies(hf_config)
    if not possible:
        return {}
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        found = [sorted(storage.run(list_carried_tensors, source, hf_config))]
    dist.broadcast_object_list(found)
    left_out = family.find_left_out(hf_config)
    return {
        name: family.tied[possible[name]] if possible[name] in left_out else possible[name]
        for name in found[0]
        if name in possible
    }


def _add_copies(of_name: Mapping[str, T], copies: Mapping[str, str]) -> dict[str, T]:
    """Return what is known of each name, with the same for copies as for their originals."""
    return {**of_name, **{copy: of_name[original] for copy, original in copies.items()}}


def _copy_shards(shards: Sequence[Shard], copies: Mapping[str, str]) -> list[Shard]:
    """Return the shards of copies, which lie where those of their originals do."""
    return [
        replace(shard, box=replace(shard.box, name=copy))
        for copy, original in copies.items()
        for shard in shards
        if shard.box.name == original
    ]


def _plan_round(
    held_by: Sequence[Sequence[Shard]], files: Sequence[ExportFile], world_size: int
) -> tuple[SlicePlan, list[list[Shard]]]:
    """Plan the transfers for one file per rank; return the plan and each rank's target shards."""
    targets = list_export_targets(files, world_size)
    names = {shard.box.name for shards in targets for shard in shards}
    sources = [[shard for shard in shards if shard.box.name in names] for shards in held_by]
    return make_plan(sources, targets), targets


@torch.no_grad()
def exchange(
    plan: SlicePlan, rank: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    """Carry out this rank's part of a plan, with one message per peer of the default group."""
    inboxes = []
    for peer, transfers in _group_by_peer(plan.recvs(rank), "source_rank"):
        buffer = torch.empty(sum(t.num_bytes for t in transfers), dtype=torch.uint8)
        work = None if peer == rank else dist.irecv(buffer, src=peer)
        inboxes.append((peer, work, buffer, transfers))
    sent = []
    for peer, transfers in _group_by_peer(plan.sends(rank), "target_rank"):
        packed = torch.cat([_bytes_of(t, source) for t in transfers])
        if peer == rank:
            own_inbox = next(buffer for peer, _, buffer, _ in inboxes if peer == rank)
            own_inbox.copy_(packed)
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


def _group_by_peer(
    transfers: Sequence[Transfer], attribute: str
) -> list[tuple[int, list[Transfer]]]:
    """Group transfers by the rank that `attribute` names, in the order of ranks."""
    key = attrgetter(attribute)
    return [(peer, list(group)) for peer, group in groupby(sorted(transfers, key=key), key=key)]


def _bytes_of(transfer: Transfer, source: Mapping[str, Tensor]) -> Tensor:
    dtype = getattr(torch, transfer.target.dtype)
    return transfer.source.view(source).to("cpu", dtype).contiguous().view(-1).view(torch.uint8)
