"""Giving up device memory and taking it back does not change training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import Config, ModelConfig, ParallelConfig
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.models import read_models
from mcore_rl.train.offload import TRAINING, WEIGHTS, DeviceMemory
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)


def steps(rank: int, world_size: int, port: int, path: str, dtype: str, give_up: bool) -> Any:
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_changes_by_it(tmp_path: Path, dtype: str) -> None:
    path = str(write_hf_model(tmp_path))
    _, logprobs, stats = run_ranks(steps, 2, path, dtype, False)[0]
    held, same_logprobs, same_stats = run_ranks(steps, 2, path, dtype, True)[0]
    assert all(torch.equal(got, want) for got, want in zip(same_logprobs, logprobs, strict=True))
    assert same_stats == stats
    nothing, weights, all_of_it = (held[parts] for parts in ((), (WEIGHTS,), (WEIGHTS, TRAINING)))
    assert nothing == 0
    config = Config(model=ModelConfig(path=path, dtype=dtype), parallel=ParallelConfig(tp=2, ep=2))
    predicted = predict_memory(config, read_models(config), "trainer")[0].uses
    assert weights == pytest.approx(predicted["weights"], rel=0.02)
    state = sum(predicted[part] for part in ("weights", "gradients", "optimizer"))
    assert all_of_it == pytest.approx(state, rel=0.02)
    # float32: gradients and two moments; bfloat16: those, and main weights, in float32
    assert all_of_it / weights == pytest.approx({"float32": 4, "bfloat16": 9}[dtype], rel=0.05)
