"""A save writes checksums; on a full disk it names the file and spares earlier checkpoints."""

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mcore_rl.config import ParallelConfig
from mcore_rl.process.disk import DiskFullError
from mcore_rl.train import checkpoint_save
from mcore_rl.train.checkpoint_save import INCOMPLETE, _write_buckets, start_save
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.storage import Storage
from mcore_rl.weights.hf.checksums import read_manifest, sum_file
from tests.support.distributed import run_ranks

write_buckets = checkpoint_save._write_buckets


def save_twice(rank: int, world_size: int, port: int, root: Path) -> str:
    """Save step_3; save step_4 while rank 1's disk is full; return the message of the second."""
    parallel = ParallelConfig(dp=world_size)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    weight_part = torch.arange(64.0) + 64 * rank
    weight = ShardedTensor.from_rank_offsets("weight", weight_part, (0, rank, world_size))
    start_save({"weight": weight, "step": 3}, root / "step_3").finish(60.0)
    if rank == 1:
        checkpoint_save._write_buckets = write_to_full_disk
    save = start_save({"weight": weight, "step": 4}, root / "step_4")
    with pytest.raises(DiskFullError) as raised:
        save.finish(60.0)
    return str(raised.value)


def write_to_full_disk(
    transforms: list[Any], buckets: list[Any], results: "queue.Queue[Any]", storage: Storage
) -> Exception | None:
    """Write the files to /dev/full, where every write fails with ENOSPC."""
    for path, _, _ in buckets:
        Path(path).symlink_to("/dev/full")
    return write_buckets(transforms, buckets, results, storage)


@pytest.mark.gloo
def test_a_full_disk_is_one_line_on_every_rank_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    messages = run_ranks(save_twice, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert f"step_4{INCOMPLETE}/__1_0.distcp: no space left on device" in messages[0]
    assert "\n" not in messages[0]
    assert not (tmp_path / "step_4").exists()

    folder = tmp_path / "step_3"
    sums = read_manifest(folder)
    assert sums is not None
    names = {path.name for path in folder.iterdir()} - {"checksums.json"}
    assert sums.keys() == names > {".metadata", "metadata.json", "__1_0.distcp"}
    for name, entry in sums.items():
        assert sum_file(folder / name, [span.stop for span in entry.spans]) == entry


def test_another_error_of_the_writer_is_reported_as_it_is(tmp_path: Path) -> None:
    results: queue.Queue[Any] = queue.Queue()
    file = tmp_path / "no such folder" / "part"
    error = _write_buckets([], [(str(file), file.name, ([], []))], results)
    assert isinstance(error, FileNotFoundError)
    assert results.get_nowait() is error
