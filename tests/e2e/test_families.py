"""Whole runs with GRPO, by family of models; `make test` has one of them in test_train.py."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoint_tools.cli import main
from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.layouts.sglang_models import EXPERT_BIASES
from mcore_rl.weights.models import family_of
from tests.data.test_tokenizer import write_tokenizer_that_is_code
from tests.e2e.test_train import (
    Start,
    assert_engine_agrees,
    changed_tensors,
    steps_of,
    write_family,
)
from tests.support.tiny_kimi_k25 import write_int4_kimi_k25_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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
    "glm4_moe_lite": EXPERT_PARALLEL,
    "hunyuan_v3": EXPERT_PARALLEL,
    "qwen3_next": EXPERT_PARALLEL,
    "deepseek_v32": {**EXPERT_PARALLEL, "attention_dp": 2},
    "glm5": {},
    "nemotron3": EXPERT_PARALLEL,
}
"""Kind of model -> the ranks of its engine."""
MOST_OTHER_KEYS = 1e-3
"""Share of the engine's keys that rounding may have the trainer's indexers leave out."""
INDEXER_REPLAY = {"deepseek_v32": "engine", "glm5": "none"}
"""Kind of model -> whose keys its tokens attend to in training; the run counts others' with none.
"""


@pytest.mark.parametrize("kind", ENGINES)
def test_a_model_trains(start: Start, arithmetic: Path, tmp_path: Path, kind: str) -> None:
    model = write_family(kind, arithmetic, tmp_path / kind)
    config = read_hf_config(model)
    biases = [name for name in family_of(config).shapes(config) if name.endswith(EXPERT_BIASES)]
    is_sparse = "index_topk" in config
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
        f"drift.indexer_topk={str(is_sparse).lower()}",
        f"train.indexer_replay={INDEXER_REPLAY.get(kind, 'none')}",
    )
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=2)
    run.assert_nothing_left()
    exported = json.loads((run.run_dir / "hf" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert set(biases) <= exported.keys() & set(changed_tensors(model, run.run_dir / "hf"))
    assert all(line["logprob_diff/router_flip_share"] == 0 for line in steps_of(run))
    if is_sparse:
        shares = [line.get("indexer/differing_share", -1.0) for line in steps_of(run)]
        replays = INDEXER_REPLAY[kind] == "engine"
        assert all(share < MOST_OTHER_KEYS and (share < 0) == replays for share in shares)


def test_the_language_model_of_kimi_k25_trains_from_int4(
    start: Start, arithmetic: Path, tmp_path: Path
) -> None:
    """Ranks decode what they hold; the engine starts without weights and gets plain ones.

    The tokenizer is code beside the model, as in the published files.
    """
    source = arithmetic / "model"
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    whole = write_int4_kimi_k25_model(tmp_path / "whole", vocab_size=vocab_size)
    for path in source.iterdir():
        if not (whole / path.name).exists() and path.suffix != ".safetensors":
            shutil.copy(path, whole)
    write_tokenizer_that_is_code(whole)
    text = tmp_path / "text"
    assert main(["text-only", str(whole), str(text), "--workers=1"]) == 0
    run = start(
        "train",
        f"model.path={text}",
        "model.trust_remote_code=true",
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
    exported = ModelFacts.read(run.run_dir / "hf")
    assert ModelFacts.read(text).packing == "int4" and not exported.is_packed
    assert "quantization_config" not in (exported.path / "config.json").read_text()
