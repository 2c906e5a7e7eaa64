"""transformers, Megatron and SGLang give the same log-probs of text among images."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.image_request import PATH, pack_request
from mcore_rl.types import Images
from tests.support.distributed import run_ranks
from tests.support.odd_images import make_vision_tokenizer, write_processor
from tests.support.tiny_training import make_actor
from tests.support.tiny_vision import (
    PLACEHOLDER,
    load_vision_model,
    make_vision_batches,
    split_batch,
    transformers_vision_logprobs,
    write_vision_model,
)


def megatron_logprobs(rank: int, world_size: int, port: int, model: ModelConfig) -> list[Tensor]:
    actor = make_actor(rank, world_size, port, model, ParallelConfig())
    scores = actor.compute_logprobs(make_vision_batches())
    assert scores is not None
    return [score.logprobs_T for score in scores]


def engine_logprobs(url: str, ids_T: Tensor, images: dict[str, Tensor]) -> Tensor:
    body = {
        "input_ids": ids_T.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if images:
        grids_I3 = images["image_grid_thw"]
        packed = pack_request(body, Images(images["pixel_values"], grids_I3, (len(grids_I3),)))
        answer = post(url + PATH, packed, "application/octet-stream")
    else:
        answer = post(url + "/generate", json.dumps(body).encode(), "application/json")
    return torch.tensor([each[0] or 0.0 for each in answer["meta_info"]["input_token_logprobs"]])


def post(url: str, data: bytes, kind: str) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.mark.e2e
@pytest.mark.gloo
def test_three_programs_agree(tmp_path: Path) -> None:
    folder = write_processor(
        write_vision_model(tmp_path / "model"),
        processor_class="Qwen2_5_VLProcessor",
        patch_size=14,
    )
    make_vision_tokenizer().save_pretrained(folder)
    [trainer] = run_ranks(megatron_logprobs, 1, ModelConfig(path=str(folder)), timeout_s=300.0)
    with torch.no_grad():
        wanted = transformers_vision_logprobs(load_vision_model(folder), make_vision_batches())
    spec = EngineSpec(str(folder), str(tmp_path / "log"), kv_cache_len=2048, max_running=8)
    with EngineProcess(spec) as engine:
        for batch, ours_T, theirs_T in zip(make_vision_batches(), trainer, wanted, strict=True):
            asked = [engine_logprobs(engine.url, *each) for each in split_batch(batch)]
            is_text_T = batch.token_ids_T != PLACEHOLDER
            for found_T in (torch.cat(asked), ours_T):
                assert (found_T - theirs_T)[is_text_T].abs().max() < 1e-5
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(engine.url + PATH, b"no tensors", "application/octet-stream")
