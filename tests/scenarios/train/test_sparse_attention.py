"""Attention to the keys that an indexer chooses: whose choice counts, and what stays untrained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from tests.support.distributed import run_each
from tests.support.indexers import find_max_error
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
)

EVERYTHING = 64
"""A choice of so many keys leaves out none of the longest sequence."""


def score_and_step(rank: int, world_size: int, port: int, folder: Path, case: Any) -> Any:
    """Return log-probs, and the layers' weights on this rank before and after a step."""
    name, layout = case
    model = ModelConfig(path=str(folder / name))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    scores = actor.compute_logprobs(my_batches())
    weights = [tensors_of(actor)]
    actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    weights.append(tensors_of(actor))
    return scores and [score.logprobs_T for score in scores], weights


def tensors_of(actor: Any) -> dict[str, Tensor]:
    shards, tensors = actor.weight_layout()
    return {f"{s.box}": s.view(tensors).clone() for s in shards if "layers" in s.box.name}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    write_model("deepseek_v32", folder / "sparse")
    write_model("deepseek_v32", folder / "everything", index_topk=EVERYTHING)
    write_model("glm5", folder / "glm5", rms_norm_eps=1e-5)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    names = ["sparse", "everything", "glm5"]
    results = run_each(score_and_step, 1, [(name, {}) for name in names], folder)
    return {name: result for name, (result,) in zip(names, results, strict=True)}


def score_by_transformers(path: Path, epsilon: float | None = None) -> list[Tensor]:
    """Return token-aligned log-probs; `epsilon` is that of the norms of latents."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, module in model.named_modules():
        if epsilon and name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = epsilon  # type: ignore[assignment]
    out = []
    for batch in make_batches():
        rows = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                logits = model(tokens[None]).logits[0]
            rows += [torch.zeros(1), logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]]
        out.append(torch.cat(rows))
    return out


@pytest.mark.gloo
def test_keys_that_are_not_chosen_are_not_read(folder: Path, alone: dict[str, Any]) -> None:
    """The same weights give other log-probs if the indexer may choose every key."""
    for name in ("sparse", "everything"):
        assert find_max_error(alone[name][0], score_by_transformers(folder / name)) < 1e-5
    assert find_max_error(alone["sparse"][0], alone["everything"][0]) > 0.1
    sparse, whole = (
        (
            part.split(list(batch.lens_N))
            for part, batch in zip(alone[name][0], make_batches(), strict=True)
        )
        for name in ("sparse", "everything")
    )
    for got, want in zip(sparse, whole, strict=True):
        for short, dense in zip(got, want, strict=True):  # as many keys as tokens up to 6
            assert find_max_error([short[:7]], [dense[:7]]) < 1e-5


@pytest.mark.gloo
def test_norms_of_latents_have_the_epsilon_of_config_json(
    folder: Path, alone: dict[str, Any]
) -> None:
    """As in engines; transformers 5.19 takes 1e-6 there, whatever config.json says."""
    assert json.loads((folder / "glm5/config.json").read_text())["rms_norm_eps"] == 1e-5
    assert find_max_error(alone["glm5"][0], score_by_transformers(folder / "glm5", 1e-5)) < 2e-6
    assert find_max_error(alone["glm5"][0], score_by_transformers(folder / "glm5")) > 1e-5


@pytest.mark.gloo
def test_a_step_leaves_indexers_bit_for_bit(folder: Path, alone: dict[str, Any]) -> None:
    cut = run_each(score_and_step, 2, [("sparse", {"tp": 2, "ep": 2})], folder)
    for _, (before, after) in [*alone.values(), *cut[0]]:
        indexers = {name for name in before if ".indexer." in name}
        assert len(indexers) == 4 * 5
        for name in before.keys() - {name for name in before if "correction_bias" in name}:
            assert torch.equal(before[name], after[name]) == (name in indexers), name
