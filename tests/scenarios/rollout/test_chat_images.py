"""A served model sees an image of a chat as it saw images in training: resized by Pillow."""

import base64
import json
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.data.images.batch import join_patches
from mcore_rl.data.images.encoded import EncodedImage, expand_placeholders
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.image_request import PATH, pack_request
from mcore_rl.tasks.tiny_models import (
    IMAGE_END,
    IMAGE_START,
    PLACEHOLDER,
    PROCESSOR,
    qwen2_5_vl_config,
)
from tests.support.odd_images import encode, make_vision_tokenizer, noise
from tests.support.tiny_kimi_vl import (
    KIMI_K25_PROCESSOR,
    KIMI_VL_PROCESSOR,
    write_kimi_k25_model,
    write_kimi_vl_model,
)
from tests.support.tiny_qwen3_vl import write_qwen3_vl_model

MEDIA = "<|media_pad|>"
"""The placeholder of Kimi-VL and Kimi-K2.5."""
KIMIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kimi_vl": (write_kimi_vl_model, KIMI_VL_PROCESSOR),
    "kimi_k25": (write_kimi_k25_model, KIMI_K25_PROCESSOR),
}


def write_served_model(folder: Path, kind: str) -> Any:
    """Write a random model and its processor; return its tokenizer of bytes.

    SGLang decodes and encodes chats again, which words with spaces between them do not survive.
    """
    tokenizer = make_vision_tokenizer()
    tokenizer.add_tokens(["<|end|>", "<|pad|>"], special_tokens=True)
    tokenizer.eos_token = "<|end|>"
    tokenizer.pad_token = "<|pad|>"
    if kind in KIMIS:
        tokenizer.chat_template = tokenizer.chat_template.replace(PLACEHOLDER, MEDIA)
        tokenizer.add_tokens([MEDIA], special_tokens=True)
    ids = tokenizer.get_vocab()
    folder.mkdir()
    write = {
        "qwen2_5_vl": write_qwen2_5_vl,
        "qwen3_vl": write_qwen3_vl,
        **{each: partial(write_kimi, each) for each in KIMIS},
    }
    write[kind](folder, ids)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_qwen2_5_vl(folder: Path, ids: dict[str, int]) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = qwen2_5_vl_config(sorted(ids, key=lambda token: ids[token]))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))
    model.save_pretrained(folder)


def write_qwen3_vl(folder: Path, ids: dict[str, int]) -> None:
    """Write a model whose patches are 16 pixels wide."""
    size = {"shortest_edge": 4 * 32**2, "longest_edge": 64 * 32**2}
    processor = {"processor_class": "Qwen3VLProcessor", "patch_size": 16, "size": size}
    write_qwen3_vl_model(folder, vocab_size=len(ids), eos_token_id=ids["<|end|>"])
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": ids[PLACEHOLDER], "vision_start_token_id": ids[IMAGE_START]}
    config |= {"vision_end_token_id": ids[IMAGE_END], "eos_token_id": ids["<|end|>"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **processor}))


def write_kimi(kind: str, folder: Path, ids: dict[str, int]) -> None:
    write, processor = KIMIS[kind]
    write(folder, vocab_size=len(ids))
    config = json.loads((folder / "config.json").read_text())
    config["media_placeholder_token_id"] = ids[MEDIA]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def post(url: str, data: bytes, kind: str = "application/json") -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: HTTP {error.code}: {error.read()[:500]}") from error


def chat_logprob(url: str, picture: bytes) -> tuple[float, int]:
    """Return the greedy token's log-prob by the OpenAI API, and the tokens of the prompt."""
    uri = "data:image/png;base64," + base64.b64encode(picture).decode()
    image = {"type": "image_url", "image_url": {"url": uri}}
    content = [image, {"type": "text", "text": "What?"}]
    body = {
        "model": "served",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": True,
    }
    answer = post(f"{url}/v1/chat/completions", json.dumps(body).encode())
    [token] = answer["choices"][0]["logprobs"]["content"]
    return token["logprob"], answer["usage"]["prompt_tokens"]


def ask_about_video(url: str, picture: bytes) -> None:
    kinds = {"image_url": "image/png", "video_url": "video/mp4"}
    content: list[dict[str, Any]] = [
        {"type": each, each: {"url": f"data:{kind};base64,{base64.b64encode(picture).decode()}"}}
        for each, kind in kinds.items()
    ]
    content.append({"type": "text", "text": "What?"})
    body = {"model": "served", "messages": [{"role": "user", "content": content}]}
    post(f"{url}/v1/chat/completions", json.dumps(body | {"max_tokens": 1}).encode())


def patches_logprob(
    url: str, folder: Path, tokenizer: Any, placeholder: int, picture: bytes
) -> tuple[float, int]:
    """Return the same by the patches that the trainer would have."""
    patches = ImageProcessor(folder).patches(EncodedImage(picture, "picture"))
    images = join_patches([[patches]])
    assert images is not None
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    whole = expand_placeholders(ids, placeholder, [len(patches.pixels_PD) // 4])
    body = {
        "input_ids": whole,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
    }
    answer = post(url + PATH, pack_request(body, images), "application/octet-stream")
    return answer["meta_info"]["output_token_logprobs"][0][0], len(whole)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_5_vl", PLACEHOLDER),
        ("qwen3_vl", PLACEHOLDER),
        ("kimi_vl", MEDIA),
        ("kimi_k25", MEDIA),
    ],
)
def test_chats_and_patches_give_the_same_log_probs(tmp_path: Path, kind: str, name: str) -> None:
    tokenizer = write_served_model(tmp_path / "model", kind)
    placeholder = tokenizer.convert_tokens_to_ids(name)
    pictures = [encode(noise(131, 90, seed=seed)) for seed in range(3)]
    spec = EngineSpec(
        str(tmp_path / "model"),
        str(tmp_path / "log"),
        kv_cache_len=4096,
        max_running=4,
        tokenizer=True,
    )
    with EngineProcess(spec) as engine:
        by_chat = [chat_logprob(engine.url, picture) for picture in pictures]
        if kind in KIMIS:
            with pytest.raises(AssertionError, match=r"HTTP 400: .*the model reads no videos"):
                ask_about_video(engine.url, pictures[0])
        by_patches = [
            patches_logprob(engine.url, tmp_path / "model", tokenizer, placeholder, picture)
            for picture in pictures
        ]
    assert [num for _, num in by_chat] == [num for _, num in by_patches]
    values, wanted = ([value for value, _ in found] for found in (by_chat, by_patches))
    assert values == pytest.approx(wanted, abs=1e-5)
    assert len({round(value, 3) for value in values}) == 3, "the images make no difference"
