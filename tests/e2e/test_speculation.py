"""Whole runs whose engines speculate: with n-grams, and with the layer that the run trains."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_train import Start, assert_engine_agrees, steps_of
from tests.support.tiny_mtp import write_mtp_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

COMMON = ("run.steps=2", "eval.data=[]", "rollout.deterministic=false")


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_engines_guess_with_the_layer_that_the_run_trains(
    start: Start, arithmetic: Path, tmp_path: Path, kind: str
) -> None:
    source = arithmetic / "model"
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    model = write_mtp_model(kind, tmp_path / "model", vocab_size=vocab_size)
    for path in source.iterdir():
        if not (model / path.name).exists():
            shutil.copy(path, model)
    run = start(
        "train",
        *COMMON,
        f"model.path={model}",
        "train.mtp_loss=0.3",
        "train.router_replay=engine",
        "train.router_bias_rate=0.0",
        "train.optimizer.lr=1e-3",
        "parallel.tp=2",
        "rollout.tp=2",
        "rollout.ep=2",
        "rollout.speculate=mtp",
        "rollout.speculate_tokens=2",
    )
    assert run.finish() == 0, run.tail()
    assert_engine_agrees(run, num_steps=2)
    run.assert_nothing_left()
    steps = steps_of(run)
    assert steps[0]["drafts/pass_share"] > 0
    for step in steps:  # engines are still measuring, and a step may have no pass with drafts
        assert step["drafts/version"] == step["step"] - 1
        assert 0 <= step.get("drafts/acceptance", 0) <= 1
        assert 1 <= step.get("drafts/tokens_per_pass", 1) <= 3
        assert step["logprob_diff/router_flip_share"] == 0 < step["mtp/loss"]
        assert step["logprob_diff/token_max"] < 1e-4, "a token was replayed with other experts"


def test_engines_guess_with_n_grams_while_weights_change(start: Start) -> None:
    run = start(
        "train",
        *COMMON,
        "run.steps=4",
        "rollout.mode=async",
        "algorithm.correction.weight=token",
        "drift.routed_experts=false",
        "train.router_replay=none",
        "rollout.speculate=ngram",
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = steps_of(run)
    assert len(steps) == 4
    for step in steps:
        assert step["logprob_diff/arithmetic"] < 1e-4, step
        assert 0 < step["sync/parity_diff"] < 1e-4, step
    versions = [step["drafts/version"] for step in steps if "drafts/version" in step]
    assert versions == sorted(versions) and versions[-1] >= 2
