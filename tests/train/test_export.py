"""A model cut over ranks is exported whole: every file by one rank, with checksums and index."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.train.export import exchange, export_hf
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.hf.checksums import MANIFEST, read_manifest
from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.hf.files import cover_whole_tensor
from mcore_rl.weights.hf.folder import INDEX
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.plan.whole import make_plan
from tests.support.distributed import run_ranks
from tests.support.small_hf import assert_equal, read_all, write_small_model

MAX_FILE_BYTES = 1000


@contextmanager
def process_group(rank: int, world_size: int, port: int) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(weights: dict[str, Tensor], rank: int, world_size: int) -> tuple[list[Shard], Any]:
    """Return shards and tensors of a rank: rows of all tensors that divide, the others whole."""
    shards: list[Shard] = []
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        num_rows, left = divmod(shape[0], world_size)
        if left:
            shards.append(cover_whole_tensor(name, shape, "bfloat16"))
            tensors[name] = tensor
            continue
        first = rank * num_rows
        start = (first, *(0 for _ in shape[1:]))
        stop = (first + num_rows, *shape[1:])
        tensors[name] = tensor[first : first + num_rows].contiguous()
        shards.append(Shard(Box(name, start, stop), name, 0, tensors[name].stride(), "bfloat16"))
    return shards, tensors


def export(rank: int, world_size: int, port: int, source: Path, out: Path) -> None:
    with process_group(rank, world_size, port):
        shards, tensors = cut(read_all(source), rank, world_size)
        config = read_hf_config(source)
        export_hf(shards, tensors, config, "bfloat16", out, source, MAX_FILE_BYTES)


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_export_is_the_model_that_was_cut(tmp_path: Path, world_size: int) -> None:
    source = write_small_model(tmp_path / "hf")
    out = tmp_path / "out"
    run_ranks(export, world_size, source, out)
    assert_equal(out, source)
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == open_hf_dir(ModelFacts.read(out)).keys()
    files = set(weight_map.values())
    assert len(files) > world_size
    sums = read_manifest(out)
    assert sums is not None
    assert sums.keys() == {path.name for path in out.iterdir()} - {MANIFEST}
    assert (out / "tokenizer.json").is_file()


def test_a_ranks_own_slices_are_cut_and_cast_without_a_message() -> None:
    """A plan of one rank needs no process group."""
    held = Shard(Box("w", (0, 0), (4, 3)), "fused", 3, (3, 1), "float32")
    wanted = [
        Shard(Box("w", (0, 0), (2, 3)), "top", 0, (3, 1), "bfloat16"),
        Shard(Box("w", (2, 0), (4, 3)), "bottom", 0, (1, 2), "bfloat16"),
    ]
    fused = torch.arange(15, dtype=torch.float32)
    target = {
        "top": torch.zeros(6, dtype=torch.bfloat16),
        "bottom": torch.zeros(6, dtype=torch.bfloat16),
    }
    exchange(make_plan([[held]], [wanted]), 0, {"fused": fused}, target)
    assert target["top"].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert target["bottom"].tolist() == [9.0, 12.0, 10.0, 13.0, 11.0, 14.0]
