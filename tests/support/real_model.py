"""Has SmolLM2-135M-Instruct written, and log-probs of it computed by ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import TrainBatch
from tests.support.policy import ROOT
from tests.support.tiny_training import make_actor

DOWNLOAD_S = 900


def write_smollm2(folder: Path) -> Path:
    """Weights in float32, config.json and tokenizer with its chat template; downloads 93 MB."""
    script = ROOT / "benchmarks" / "smollm2.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=DOWNLOAD_S)
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
