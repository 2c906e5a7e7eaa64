"""transformers, Megatron and SGLang give the same log-probs of text among images."""

import urllib.error
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.image_request import PATH
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks
from tests.support.image_requests import KINDS, TOLERANCE, engine_logprobs, post, write_served_model
from tests.support.tiny_training import make_actor
from tests.support.tiny_vision import (
    PLACEHOLDER,
    batches_of,
    batches_of_one_color,
    load_vision_model,
    split_batch,
    transformers_vision_logprobs,
)


def list_batches(folder: str | Path) -> list[TrainBatch]:
    return [*batches_of(folder), *batches_of_one_color(folder)]


def megatron_logprobs(rank: int, world_size: int, port: int, model: ModelConfig) -> list[Tensor]:
    actor = make_actor(rank, world_size, port, model, ParallelConfig())
    scores = actor.compute_logprobs(list_batches(model.path))
    assert scores is not None
    return [score.logprobs_T for score in scores]


@pytest.mark.e2e
@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "qwen3_vl")) for k in KINDS]
)
def test_three_programs_agree(tmp_path: Path, kind: str) -> None:
    folder = write_served_model(tmp_path / "model", kind)
    [trainer] = run_ranks(megatron_logprobs, 1, ModelConfig(path=str(folder)), timeout_s=300.0)
    batches = list_batches(folder)
    with torch.no_grad():
        wanted = transformers_vision_logprobs(load_vision_model(folder), batches)
    spec = EngineSpec(str(folder), str(tmp_path / "log"), kv_cache_len=2048, max_running=8)
    with EngineProcess(spec) as engine:
        for batch, ours_T, theirs_T in zip(batches, trainer, wanted, strict=True):
            asked = [engine_logprobs(engine.url, *each) for each in split_batch(batch)]
            is_text_T = batch.token_ids_T != PLACEHOLDER
            for found_T in (torch.cat(asked), ours_T):
                assert (found_T - theirs_T)[is_text_T].abs().max() < TOLERANCE[kind]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(engine.url + PATH, b"no tensors", "application/octet-stream")
