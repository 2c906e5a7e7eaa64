"""A step of GRPO end to end with a DeepSeek-like model: latent attention, shared experts, biased routing."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_train import Start, assert_engine_agrees, changed_tensors, steps_of
from tests.tiny_models import write_model

pytestmark = pytest.mark.e2e


def write_deepseek(arithmetic: Path, folder: Path) -> Path:
    """Random weights, and the tokenizer of the arithmetic problems."""
    vocab_size = json.loads((arithmetic / "model" / "config.json").read_text())["vocab_size"]
    write_model("deepseek_v3", folder, vocab_size=vocab_size)
    for path in (arithmetic / "model").iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    return folder


def test_a_deepseek_like_model_trains(start: Start, arithmetic: Path, tmp_path: Path) -> None:
    model = write_deepseek(arithmetic, tmp_path / "deepseek")
    run = start(
        "train",
        f"model.path={model}",
        "train.router_bias_rate=0.01",
        "train.router_replay=engine",
        "run.steps=2",
        "train.optimizer.lr=1e-3",
        "eval.data=[]",
        "parallel.tp=2",
        "rollout.tp=2",
        "rollout.ep=2",
    )
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=2)
    run.assert_nothing_left()
    exported = json.loads((run.run_dir / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert bias in exported and bias in changed_tensors(model, run.run_dir / "hf")
    assert all(line["logprob_diff/router_flip_share"] == 0 for line in steps_of(run))
