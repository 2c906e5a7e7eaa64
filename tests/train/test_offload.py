"""Giving up device memory and taking it back does not change training, nor what is saved then."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import Config, ModelConfig, ParallelConfig
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import NO_LINKS
from mcore_rl.train import checkpoint_save
from mcore_rl.train.actor import Actor
from mcore_rl.train.offload import TRAINING, WEIGHTS, DeviceMemory
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

OTHERS = [pytest.param(layout, marks=pytest.mark.slow) for layout in ({"dp": 2}, {"pp": 2})]


def steps(rank: int, world_size: int, port: int, path: str, dtype: Any, give_up: bool) -> Any:
    """Return bytes by parts held, log-probs before each of two steps, and the steps' stats."""
    model, parallel = ModelConfig(path=path, dtype=dtype), ParallelConfig(tp=2, ep=2)
    actor = make_actor(rank, world_size, port, model, parallel)
    assert isinstance(actor._memory, DeviceMemory)
    held, logprobs, stats = {}, [], []
    for _ in range(2):
        if give_up:
            actor.hold(())
            held[()] = actor._memory.num_bytes
            actor.hold((WEIGHTS,))
            held[WEIGHTS,] = actor._memory.num_bytes
            assert not any(
                buffer.grad_data.untyped_storage().nbytes() for buffer in actor.chunks[0].buffers
            )
        scores = actor.compute_logprobs(my_batches())
        logprobs.append(scores and scores[0].logprobs_T)
        if give_up:
            actor.hold((WEIGHTS, TRAINING))
            held[WEIGHTS, TRAINING] = actor._memory.num_bytes
        stats.append(
            actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        )
    return held, logprobs, stats


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_nothing_changes_by_it(tmp_path: Path, dtype: Any) -> None:
    path = str(write_hf_model(tmp_path))
    _, logprobs, stats = run_ranks(steps, 2, path, dtype, False)[0]
    held, same_logprobs, same_stats = run_ranks(steps, 2, path, dtype, True)[0]
    assert all(torch.equal(got, want) for got, want in zip(same_logprobs, logprobs, strict=True))
    assert same_stats == stats
    nothing, weights, all_of_it = (held[parts] for parts in ((), (WEIGHTS,), (WEIGHTS, TRAINING)))
    assert nothing == 0
    config = Config(model=ModelConfig(path=path, dtype=dtype), parallel=ParallelConfig(tp=2, ep=2))
    predicted = predict_memory(PlannedRun.make(config), "trainer", NO_LINKS)[0].uses
    assert weights == pytest.approx(predicted["weights"], rel=0.02)
    state = sum(predicted[part] for part in ("weights", "gradients", "optimizer"))
    assert all_of_it == pytest.approx(state, rel=0.02)
    # float32: gradients and two moments; bfloat16: those, and main weights, in float32
    assert all_of_it / weights == pytest.approx({"float32": 4, "bfloat16": 9}[dtype], rel=0.05)


def save_held_and_moved_out(
    rank: int, world_size: int, port: int, path: str, layout: Any, root: Path
) -> tuple[int, int, bool]:
    """Save and export twice after a step, at first from device memory, then from host memory.

    The second save is written late, while training goes on. Returns the bytes written from the
    memory that was moved out, those written from other memory, and whether `hold` waited for the
    writer before it overwrote that memory.
    """
    model = ModelConfig(path=path, dtype="bfloat16")
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    step(actor)
    actor.save(root / "held", {})
    actor.finish_save()
    actor.export_hf(root / "held_hf")

    actor.hold(())
    may_write = threading.Event()
    written: list[tuple[int, int]] = []
    write = checkpoint_save._write_buckets

    def write_late(transforms: Any, buckets: Any, results: Any, storage: Any) -> Any:
        may_write.wait(60)
        written.extend(
            (tensor.data_ptr(), tensor.nbytes)
            for _, _, (_, members) in buckets
            for _, tensor in members
        )
        return write(transforms, buckets, results, storage)

    checkpoint_save._write_buckets = write_late
    actor.save(root / "moved_out", {})
    checkpoint_save._write_buckets = write
    actor.export_hf(root / "moved_out_hf")
    actor.hold((WEIGHTS, TRAINING))
    step(actor)
    held_back = threading.Timer(0.5, may_write.set)
    held_back.start()
    actor.hold(())
    waited = may_write.is_set() and bool(written)
    actor.finish_save()
    from_host = sum(num_bytes for at, num_bytes in written if in_host_copy(actor, at))
    return from_host, sum(num_bytes for _, num_bytes in written) - from_host, waited


def step(actor: Actor) -> None:
    actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def in_host_copy(actor: Actor, address: int) -> bool:
    copies = [memory._host for memory in actor._memory._by_key.values() if memory._host is not None]
    return any(0 <= address - copy.data_ptr() < copy.nbytes for copy in copies)


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, *OTHERS])
def test_a_checkpoint_of_state_that_is_moved_out_is_the_same_and_copies_little(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    path = str(write_hf_model(tmp_path))
    saves = run_ranks(save_held_and_moved_out, 2, path, layout, tmp_path)
    for name in ("", "_hf"):
        held, moved_out = (
            json.loads((tmp_path / f"{kind}{name}" / "checksums.json").read_text())["files"]
            for kind in ("held", "moved_out")
        )
        for sums in (held, moved_out):
            sums.pop(".metadata", None)  # it holds the folder's own path
        assert held and held == moved_out, name
    for from_host, copied, waited in saves:
        assert waited
        assert from_host > 0
        # One rank writes a whole parameter, also the parts that other ranks update.
        most = 0.5 if "dp" in layout else 0.01
        assert copied <= most * from_host, (copied, from_host)
