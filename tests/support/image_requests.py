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
from tests.support.tiny_glm4v import write_glm4v_model
from tests.support.tiny_kimi_vl import (
    KIMI_K25_PROCESSOR,
    KIMI_VL_PROCESSOR,
    write_kimi_k25_model,
    write_kimi_vl_model,
)
from tests.support.tiny_qwen3_vl import (
    write_qwen3_5_model,
    write_qwen3_5_moe_model,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)
from tests.support.tiny_vision import write_vision_model

QWEN3_VL = {"processor_class": "Qwen3VLProcessor", "patch_size": 16}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_5_vl": (write_vision_model, {"processor_class": "Qwen2_5_VLProcessor"}),
    "glm4v_moe": (
        write_glm4v_model,
        {"processor_class": "Glm4vProcessor", "image_processor_type": "Glm4vImageProcessor"},
    ),
    "qwen3_vl": (write_qwen3_vl_model, QWEN3_VL),
    "qwen3_vl_moe": (write_qwen3_vl_moe_model, QWEN3_VL),
    "qwen3_5": (write_qwen3_5_model, QWEN3_VL),
    "qwen3_5_moe": (write_qwen3_5_moe_model, QWEN3_VL),
    "kimi_vl": (write_kimi_vl_model, KIMI_VL_PROCESSOR),
    "kimi_k25": (write_kimi_k25_model, KIMI_K25_PROCESSOR),
}
"""Family -> its writer, and settings of its image processor."""
TOLERANCE = {
    "qwen2_5_vl": 1e-5,
    "glm4v_moe": 5e-5,
    "qwen3_vl": 1e-5,
    "qwen3_vl_moe": 1e-5,
    "qwen3_5": 1e-5,
    "qwen3_5_moe": 1e-5,
    "kimi_vl": 1e-5,
    "kimi_k25": 1e-5,
}
"""Family -> by how much log-probs in float32 may differ between transformers and SGLang.

SGLang multiplies the patches of GLM-4.5V by a matrix, transformers convolves them.
"""


def write_served_model(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """A random model with a tokenizer and an image processor, as SGLang asks for."""
    write, settings = KINDS[kind]
    write_processor(write(folder, seed), **{"patch_size": 14, **settings})
    tokenizer = make_vision_tokenizer()
    if kind in ("kimi_vl", "kimi_k25"):
        tokenizer.add_tokens(["<|media_pad|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def engine_logprobs(url: str, ids_T: Tensor, images: dict[str, Tensor]) -> Tensor:
    """`images`: the arguments of transformers' model, of which there may be none."""
    if images:
        grids_I3 = images["image_grid_thw"]
        patches = Images(images["pixel_values"], grids_I3, (len(grids_I3),))
        return logprobs_with_images(url, ids_T, patches)
    body = json.dumps(_scoring(ids_T)).encode()
    return _logprobs(post(url + "/generate", body, "application/json"))


def logprobs_with_images(url: str, ids_T: Tensor, images: Images) -> Tensor:
    packed = pack_request(_scoring(ids_T), images)
    return _logprobs(post(url + PATH, packed, "application/octet-stream"))


def _scoring(ids_T: Tensor) -> dict[str, Any]:
    return {
        "input_ids": ids_T.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _logprobs(answer: Any) -> Tensor:
    return torch.tensor([each[0] or 0.0 for each in answer["meta_info"]["input_token_logprobs"]])


def post(url: str, data: bytes, kind: str) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": kind, **KEYS.user_headers})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
