"""Steps of GRPO end to end, by family of models."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.slices.families import family_of
from mcore_rl.slices.hf_config import read_hf_config
from tests import models_table
from tests.e2e.test_train import Start, assert_engine_agrees, changed_tensors, steps_of
from tests.tiny_models import write_model

pytestmark = pytest.mark.e2e

EXPERT_PARALLEL = {"tp": 2, "ep": 2}
ENGINES = {
    "deepseek_v3": EXPERT_PARALLEL,
    "qwen2_moe": EXPERT_PARALLEL,
    "mixtral": EXPERT_PARALLEL,
    "olmoe": {},
    "glm4_moe": EXPERT_PARALLEL,
    "minimax_m2": EXPERT_PARALLEL,
    "gpt_oss": {"tp": 2},
    "moonlight": EXPERT_PARALLEL,
    "kimi_k2": EXPERT_PARALLEL,
}
"""Kind of model -> the ranks of its engine."""


def write_family(kind: str, arithmetic: Path, folder: Path) -> Path:
    """Random weights, and the tokenizer of the arithmetic problems."""
    vocab_size = json.loads((arithmetic / "model" / "config.json").read_text())["vocab_size"]
    write_model(kind, folder, vocab_size=vocab_size)
    for path in (arithmetic / "model").iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "deepseek_v3" else pytest.mark.slow) for k in ENGINES]
)
def test_a_model_trains(start: Start, arithmetic: Path, tmp_path: Path, kind: str) -> None:
    model = write_family(kind, arithmetic, tmp_path / kind)
    config = read_hf_config(model)
    biases = [name for name in family_of(config).shapes(config) if name.endswith("e_score_correction_bias")]
    run = start(
        "train",
        f"model.path={model}",
        f"train.router_bias_rate={0.01 if biases else 0.0}",
        "train.router_replay=engine",
        "run.steps=2",
        "train.optimizer.lr=1e-3",
        "eval.data=[]",
        "parallel.tp=2",
        *(f"rollout.{name}={size}" for name, size in ENGINES[kind].items()),
    )
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=2)
    run.assert_nothing_left()
    exported = json.loads((run.run_dir / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(biases) <= exported.keys() & set(changed_tensors(model, run.run_dir / "hf"))
    assert all(line["logprob_diff/router_flip_share"] == 0 for line in steps_of(run))
    differences = [line["logprob_diff/token_max"] for line in steps_of(run)]
    models_table.record(kind, models_table.RUN, ENGINES[kind], max(differences))
