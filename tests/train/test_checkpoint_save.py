"""A save writes checksums; on a full disk it names the file and spares earlier checkpoints."""

import errno
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.process.disk import DiskFullError, UnwritableError
from mcore_rl.train import checkpoint_save
from mcore_rl.train.checkpoint_save import INCOMPLETE, _write_buckets, discard, start_save
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.storage import SHARED, SharedStorage, Storage, commit_checkpoint, make_empty
from mcore_rl.weights.hf.checksums import read_manifest, sum_file
from tests.support.disk_order import watch_disk_order
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    token_loss,
    write_hf_model,
)

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


@dataclass(frozen=True)
class FailingStorage(SharedStorage):
    """A run folder where a function fails as if its filesystem did."""

    fails: Callable[..., Any]
    number: int

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if function is self.fails:
            raise OSError(self.number, os.strerror(self.number), str(args[0]))
        return super().run(function, *args)


def fail_twice(rank: int, world_size: int, port: int, root: Path) -> list[str]:
    """Fail on rank 0 before and after the files are written; then save. Return the messages."""
    parallel = ParallelConfig(dp=world_size)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    weight = ShardedTensor.from_rank_offsets("weight", torch.ones(64), (0, rank, world_size))
    state = {"weight": weight, "step": 3}
    messages = []
    for fails, number in ((make_empty, errno.EROFS), (commit_checkpoint, errno.EIO)):
        storage = FailingStorage(fails, number)
        with pytest.raises(UnwritableError) as raised:
            start_save(dict(state), root / "step_3", storage=storage).finish(60.0)
        messages.append(str(raised.value))
        discard(root / "step_3", storage)
        assert rank or not list(root.iterdir()), "rank 0 removes what was written"
    start_save(dict(state), root / "step_3").finish(60.0)
    return messages


@pytest.mark.gloo
def test_all_ranks_learn_that_the_first_cannot_write_and_the_next_save_succeeds(
    tmp_path: Path,
) -> None:
    messages = run_ranks(fail_twice, 2, tmp_path)
    assert messages[0] == messages[1]
    for message, number in zip(messages[0], (errno.EROFS, errno.EIO), strict=True):
        assert message.startswith(f"rank 0 cannot write {tmp_path}/step_3{INCOMPLETE}: ")
        assert "read-only" in message if number == errno.EROFS else os.strerror(number) in message
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    assert (tmp_path / "step_3" / "checksums.json").is_file()


def go_on(rank: int, world_size: int, port: int, hf_dir: Path, root: Path) -> Any:
    """Save with a failing storage, train, save again; return what each step says of failures."""
    actor = make_actor(rank, world_size, port, ModelConfig(path=str(hf_dir)), ParallelConfig())
    actor.outlive_failed_saves()
    told = []

    def step() -> None:
        actor._checkpointer.wait_written()
        stats = actor.train_step(make_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        assert stats is not None
        told.append(stats.failed_saves)

    actor.keep_files_with(FailingStorage(commit_checkpoint, errno.ENOSPC))
    actor.save(root / "step_1", {})
    step()
    actor.keep_files_with(SHARED)
    actor.save(root / "step_2", {})
    step()
    return told


@pytest.mark.gloo
def test_training_outlives_a_save_that_fails_if_it_may(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    root.mkdir()
    [(first, second)] = run_ranks(go_on, 1, write_hf_model(tmp_path / "model"), root)
    [(folder, reason)] = first
    assert folder == str(root / "step_1") and "no space left on device" in reason
    assert second == ()
    assert [path.name for path in root.iterdir()] == ["step_2"]


def save_and_export(rank: int, world_size: int, port: int, hf_dir: Path, root: Path) -> Any:
    """Return the renames of a checkpoint and of an export that this rank made."""
    layout = ParallelConfig(ep=world_size)
    actor = make_actor(rank, world_size, port, ModelConfig(path=str(hf_dir)), layout)
    with watch_disk_order() as order:
        actor.save(root / "checkpoints" / "step_1", {})
        actor.finish_save()
        actor.export_hf(root / "hf")
    return order.renamed, order.too_early, sorted(order.unnamed)


@pytest.mark.gloo
def test_what_gets_its_name_is_on_the_disk_whichever_rank_wrote_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    by_rank = run_ranks(save_and_export, 2, write_hf_model(tmp_path / "model"), root)
    assert [too_early for _, too_early, _ in by_rank] == [[], []]
    renamed, _, unnamed = by_rank[0]
    assert not unnamed, "rank 0 forces the folders in which any rank has renamed files"
    assert renamed.index("step_1") < renamed.index("model.safetensors.index.json")


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
