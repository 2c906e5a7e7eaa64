"""Requests with patches of images to an engine, and a tiny model directory that it can serve."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.rollout.image_request import PATH, pack_request
from mcore_rl.types import Images
from tests.support.engine_keys import KEYS
from tests.support.odd_images import make_vision_tokenizer, write_processor
from tests.support.tiny_vision import write_vision_model


def write_served_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen2.5-VL with a tokenizer and an image processor, as SGLang asks for."""
    write_processor(
        write_vision_model(folder, seed), processor_class="Qwen2_5_VLProcessor", patch_size=14
    )
    make_vision_tokenizer().save_pretrained(folder)
    return folder


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
    request = urllib.request.Request(url, data, {"Content-Type": kind, **KEYS.user_headers})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
