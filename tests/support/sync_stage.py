"""Real engines linked to two trainer ranks, which load one of two checkpoints in turns."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.streamed_answer import StreamedAnswer, ask_for_parts
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.sync import SyncController
from tests.support.engine_keys import KEYS
from tests.support.engines import save_tiny_moe
from tests.support.megatron_layout import TrainLayout
from tests.support.trainer_processes import ProcessRanks

PROMPT = list(range(10, 22))
"""Token ids"""
PART_LEN = 8


@dataclass(frozen=True)
class Stage:
    """Engines linked to two trainer ranks, and two checkpoints of different weights."""

    checkpoints: Sequence[Path]
    engines: Sequence[EngineProcess]
    ranks: ProcessRanks
    sync_controller: SyncController

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def sync(self, version: int, urls: Sequence[str] | None = None) -> Any:
        """Load checkpoint `version` % 2 into the trainer ranks and sync; a SyncReport."""
        self.ranks.load(self.checkpoints[version % 2])
        return asyncio.run(self.sync_controller.sync(version, urls))


def save_checkpoints(folder: Path) -> list[Path]:
    """Save the same model twice; every weight differs between the two, norms included."""
    first = Path(save_tiny_moe(folder / "0"))
    second = Path(save_tiny_moe(folder / "1"))
    generator = torch.Generator().manual_seed(1)
    weights = load_file(first / "model.safetensors")
    noisy = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        noisy[name] = tensor + 0.3 * tensor.std() * noise + 0.01
    save_file(noisy, second / "model.safetensors", metadata={"format": "pt"})
    return [first, second]


@contextmanager
def open_stage(folder: Path, engine_sizes: Sequence[int], timeout_s: float) -> Iterator[Stage]:
    """Start and link an engine of so many ranks for each of `engine_sizes`."""
    checkpoints = save_checkpoints(folder)
    engines = [
        EngineProcess(
            EngineSpec(
                str(checkpoints[0]),
                str(folder / f"engine{i}.log"),
                tp=size,
                ep=size,
                kv_cache_len=4096,
                max_running=8,
                custom_weight_loaders=(LOADER,),
                keys=KEYS,
            )
        )
        for i, size in enumerate(engine_sizes)
    ]
    ranks = ProcessRanks(TrainLayout(tp=2, ep=2))
    try:
        for engine in engines:
            engine.start()
        ranks.load(checkpoints[0])
        for engine in engines:
            engine.wait_healthy()
        sync_controller = SyncController(
            ranks, bucket_mib=0.0625, timeout_s=timeout_s, keys=KEYS, verify_every=1
        )
        asyncio.run(sync_controller.connect([engine.url for engine in engines]))
        yield Stage(checkpoints, engines, ranks, sync_controller)
    finally:
        ranks.stop()
        for engine in engines:
            engine.stop()


def post(url: str, path: str, **body: Any) -> bytes:
    """POST `body` as JSON with the admin key; return the answer, also of an HTTP error."""
    headers = {"Content-Type": "application/json", **KEYS.admin_headers}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        return error.read()


def call(url: str, path: str, **body: Any) -> Any:
    """Do as `post` does, and return the JSON of the answer."""
    return json.loads(post(url, path, **body))


def served_version(url: str) -> str:
    request = urllib.request.Request(f"{url}/model_info", headers=KEYS.user_headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["weight_version"]


def checksums(url: str) -> list[dict[str, str]]:
    """For each rank: name of a parameter or buffer -> SGLang's own hash of it."""
    answer = call(url, "/weights_checker", action="checksum")
    assert answer["success"], answer
    return [rank["checksums"] for rank in answer["ranks"]]


def checksums_after_loading(url: str, checkpoint: Path) -> list[dict[str, str]]:
    """`checksums` once SGLang has loaded `checkpoint` from disk by itself."""
    loaded = call(url, "/update_weights_from_disk", model_path=str(checkpoint))
    assert loaded["success"], loaded
    return checksums(url)


def make_body(max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Ask for tokens after PROMPT, sampled greedily, with log-probs; `more` fields are sent."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}


def generate(url: str, max_new_tokens: int = 8, **more: Any) -> Any:
    """Return the engine's answer to `make_body`."""
    return call(url, "/generate", **make_body(max_new_tokens, **more))


def generate_across(
    url: str, change: Callable[[], Any], max_new_tokens: int, until: str | None = None
) -> Any:
    """Return an answer as `generate` does; `change` is called once PART_LEN tokens are drawn.

    `until`: the engine is told to end the answer once as many tokens have this version.
    """
    body = json.dumps(ask_for_parts(make_body(max_new_tokens), PART_LEN)).encode()
    headers = {"Content-Type": "application/json", **KEYS.user_headers}
    streamed = StreamedAnswer()
    request = urllib.request.Request(f"{url}/generate", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = (line.removeprefix(b"data: ") for line in response if line.strip())
        parts = (json.loads(line) for line in lines if line.strip() != b"[DONE]")
        for part in islice(parts, 2):
            streamed.add(part)
        change()
        for part in parts:
            streamed.add(part)
            span = part["meta_info"]["weight_versions"][-1]
            if span["version"] == until and span["end"] - span["start"] >= PART_LEN:
                until = None
                post(url, "/abort_request", abort_all=True)
    return streamed.make_answer()


def logprob_error(checkpoint: Path, answer: Any) -> float:
    """Largest difference of log-probs from those of transformers with `checkpoint`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = [*PROMPT, *answer["output_ids"]]
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    errors = []
    for i, token in enumerate(answer["output_ids"]):
        errors.append(abs(float(logprobs_TV[len(PROMPT) - 1 + i, token]) - own[i]))
    return max(errors)
