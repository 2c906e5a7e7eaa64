"""The rehearsal of every large recipe: one whole step with real Megatron ranks, engines and Ray."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mcore_rl.config.recipe import load_recipe
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import family_of
from tests.support.recipes import LARGE
from tests.support.runs import Run
from tests.support.tiny_vision import load_vision_model, model_type_of

pytestmark = pytest.mark.e2e

MAX_DIFF = 1e-4
"""Nats between trainer and engines; a step must move log-probs by far more."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LARGE)
def test_a_step_moves_weights_and_a_restart_goes_on(
    recipe: str, tmp_path: Path, runs: list[Run]
) -> None:
    folder = tmp_path / "run_rehearsal"
    finish(runs, "train", f"recipe={recipe}", "rehearse=true", run_dir=tmp_path / "run")
    check_step(runs[-1], 1)
    has_search = load_recipe(recipe, []).search.is_used
    assert len(list((folder / "logs").glob("search_*.log"))) == has_search
    after_one = load_weights(folder)
    logprobs_after_one = compute_logprobs(folder)

    again = ("run.steps=2", "run.resume=true")
    finish(runs, "train", f"recipe={recipe}", "rehearse=true", *again, run_dir=tmp_path / "run")
    check_step(runs[-1], 2)
    after_two = load_weights(folder)
    assert after_one.keys() == after_two.keys()
    changed = [name for name, value in after_one.items() if not value.equal(after_two[name])]
    assert len(changed) > len(after_one) / 2, f"{recipe}: only {len(changed)} tensors have changed"
    moved = (compute_logprobs(folder) - logprobs_after_one).abs().max()
    assert moved > 10 * MAX_DIFF, "an engine that missed a sync would go unnoticed"


def finish(runs: list[Run], *args: str, run_dir: Path) -> None:
    run = Run(args, run_dir)
    runs.append(run)
    assert run.finish(timeout_s=900) == 0, run.tail()
    run.assert_nothing_left()


def check_step(run: Run, step: int) -> None:
    """The gradient is not zero, engines agree with the trainer, and held-out prompts were tried.

    Where sampling goes on beside training, samples that were finished before the restart are of the
    weights before, and the parity check alone tells whether engines agree.
    """
    rows = run.metrics("../run_rehearsal")
    metrics = {name: value for row in rows if row["step"] == step for name, value in row.items()}
    assert metrics["reward/std"] > 0.1
    assert metrics["loss/grad_norm"] > 0 and math.isfinite(metrics["loss/total"])
    assert metrics.get("staleness/max", 0) <= step - 1
    assert metrics["logprob_diff/mean"] < MAX_DIFF or metrics.get("staleness/max", 0) > 0
    assert 0 < metrics["sync/parity_diff"] < MAX_DIFF
    assert metrics["eval/prompts"] > 0
    print({name: metrics.get(name) for name in ("time/step", "logprob_diff/mean", "time/sync")})


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "hf").glob("*.safetensors")):
        weights |= load_file(path)
    assert weights
    return weights


def compute_logprobs(folder: Path) -> torch.Tensor:
    """Log-probs by transformers, which must find every weight of its model in the export."""
    model = load_model(folder / "hf")
    with torch.no_grad():
        logprobs = model(torch.arange(1, 9)[None]).logits.log_softmax(-1)
    assert logprobs.isfinite().all()
    return logprobs


def load_model(folder: Path) -> Any:
    if model_type_of(folder) in ("kimi_vl", "kimi_k25"):
        return load_vision_model(folder)  # it asks for each weight of the tower by name
    sees_images = family_of(read_hf_config(folder)).has_tower
    kind: Any = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    loaded = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"], report["missing_keys"]
    return model
