"""transformers, Megatron and SGLang give the same log-probs of text among videos and images."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.support.distributed import run_ranks
from tests.support.image_requests import TOLERANCE, logprobs_with_images, write_served_model
from tests.support.tiny_training import make_actor
from tests.support.tiny_videos import pack, transformers_video_logprobs, watched_of
from tests.support.tiny_vision import PLACEHOLDER, load_vision_model

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v_moe")


def megatron_logprobs(rank: int, world_size: int, port: int, model: ModelConfig) -> Tensor:
    actor = make_actor(rank, world_size, port, model, ParallelConfig())
    scores = actor.compute_logprobs([pack(watched_of(Path(model.path)))])
    assert scores is not None
    return scores[0].logprobs_T


@pytest.mark.e2e
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_programs_agree(tmp_path: Path, kind: str) -> None:
    folder = write_served_model(tmp_path / "model", kind)
    [trained_T] = run_ranks(megatron_logprobs, 1, ModelConfig(path=str(folder)), timeout_s=300.0)
    watched = watched_of(folder)
    oracle = load_vision_model(folder)
    with torch.no_grad():
        wanted = [transformers_video_logprobs(oracle, each) for each in watched]
    spec = EngineSpec(str(folder), str(tmp_path / "log"), kv_cache_len=2048, max_running=8)
    with EngineProcess(spec) as engine:
        sampled = [
            logprobs_with_images(engine.url, each.token_ids_T, each.images) for each in watched
        ]
    lens = [len(each.token_ids_T) for each in watched]
    for each, *found, theirs_T in zip(watched, trained_T.split(lens), sampled, wanted, strict=True):
        is_text_T = each.token_ids_T < PLACEHOLDER
        for ours_T in found:
            assert (ours_T - theirs_T)[is_text_T].abs().max() < TOLERANCE[kind]
