"""An actor besides its steps: reference policy, export, recomputation, bfloat16, random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.stats import NotFiniteError
from mcore_rl.types import LogprobOptions
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    transformers_logprobs,
    with_engine_records,
    write_hf_model,
)

TP_EP: dict[str, Any] = {"tp": 2, "ep": 2}


def logprobs_of(actor: Actor, *, reference: bool = False) -> list[Tensor] | None:
    scores = actor.compute_logprobs(my_batches(), LogprobOptions(reference, temperature=1.0))
    return None if scores is None else [score.logprobs_T for score in scores]


def reference_and_export(
    rank: int, world_size: int, port: int, model: ModelConfig, out_dir: Path
) -> Any:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**TP_EP))
    first = logprobs_of(actor)
    actor.snapshot_reference()
    actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    weights = {name: tensor.clone() for name, tensor in actor.weight_layout()[1].items()}
    reference = logprobs_of(actor, reference=True)
    restored = all(torch.equal(weights[name], t) for name, t in actor.weight_layout()[1].items())
    actor.export_hf(out_dir)
    return first, reference, logprobs_of(actor), restored


@pytest.mark.gloo
def test_reference_and_export(tmp_path: Path) -> None:
    model_dir = write_hf_model(tmp_path / "model")
    (model_dir / "tokenizer.json").write_text("{}")
    out_dir = tmp_path / "export"
    answers = run_ranks(reference_and_export, 2, ModelConfig(path=str(model_dir)), out_dir)
    first, reference, trained, _ = answers[0]
    assert all(restored for *_, restored in answers)
    assert all(torch.equal(a, b) for a, b in zip(first, reference, strict=True))
    assert max((a - b).abs().max().item() for a, b in zip(first, trained, strict=True)) > 1e-3

    assert (out_dir / "tokenizer.json").read_text() == "{}"
    for got, want in zip(transformers_logprobs(out_dir), trained, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    names = []
    for path in out_dir.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += list(file.keys())
    assert len(list(out_dir.glob("*.safetensors"))) == 2
    assert len(names) == len(set(names))


def score_with_nan(rank: int, world_size: int, port: int, path: str) -> list[str]:
    """Return what the ranks say of a policy, and of its reference, of which one weight is NaN."""
    actor = make_actor(rank, world_size, port, ModelConfig(path=path), ParallelConfig())
    with torch.no_grad():
        for parameter in actor.chunks[0].parameters():
            parameter.fill_(float("nan"))
    actor.snapshot_reference()
    said = []
    for reference in (False, True):
        try:
            logprobs_of(actor, reference=reference)
        except NotFiniteError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_log_probs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    [(own, reference)] = run_ranks(score_with_nan, 1, str(write_hf_model(tmp_path)))
    assert "the trainer's log-probs of micro-batch 0 are not finite" in own
    assert "the reference's log-probs of micro-batch 0 are not finite" in reference


def step_variants(rank: int, world_size: int, port: int, path: str) -> list[Any]:
    parallel = ParallelConfig(**TP_EP)
    sampled, _ = with_engine_records(make_batches(), Path(path))
    results = []
    variants: tuple[tuple[Any, str], ...] = (
        ("float32", "none"),
        ("float32", "selective"),
        ("float32", "full"),
        ("bfloat16", "full"),
    )
    for dtype, recompute in variants:
        model = ModelConfig(path=path, dtype=dtype)
        actor = make_actor(rank, world_size, port, model, parallel, recompute=recompute)
        steps = [
            actor.train_step(
                my_batches(sampled), token_loss, temperature=1.0, num_tokens=NUM_TOKENS
            )
            for _ in range(2)
        ]
        results.append(steps)
    return results


@pytest.mark.slow
@pytest.mark.gloo
def test_recomputation_changes_nothing_and_bfloat16_little(tmp_path: Path) -> None:
    plain, selective, full, bf16 = run_ranks(step_variants, 2, str(write_hf_model(tmp_path)))[0]
    for variant, tolerance in ((selective, 1e-6), (full, 1e-6), (bf16, 3e-2)):
        for got, want in zip(variant, plain, strict=True):
            assert got.loss == pytest.approx(want.loss, abs=tolerance)
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=tolerance)
            flips = want.metrics["logprob_diff/router_flip_share"]
            assert got.metrics["logprob_diff/router_flip_share"] == pytest.approx(
                flips, abs=tolerance
            )
            assert got.metrics["router/aux_loss"] == pytest.approx(
                want.metrics["router/aux_loss"], abs=tolerance
            )
    assert plain[1].loss < plain[0].loss


def random_logprobs(rank: int, world_size: int, port: int, path: str, layout: Any) -> Any:
    model = ModelConfig(path=path, init="random")
    return logprobs_of(make_actor(rank, world_size, port, model, ParallelConfig(**layout)))


@pytest.mark.gloo
def test_random_weights_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    path = str(write_hf_model(tmp_path, tie_word_embeddings=True))
    alone = run_ranks(random_logprobs, 1, path, {})[0]
    staged = run_ranks(random_logprobs, 2, path, {"pp": 2})[1]
    for got, want in zip(staged, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    spread = torch.cat(alone)
    assert spread[spread != 0].std() > 0.1
