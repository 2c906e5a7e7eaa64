"""Layers that share an indexer (GLM-5.2), in every layout, beside transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.to_hf import to_hf
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.indexer_losses import compute_losses
from tests.support.indexers import (
    find_max_error,
    load_oracle,
    score,
    sequences_of,
    use_given_keys,
    with_random_keys,
)
from tests.support.small_hf import LARGE, ONE_WORKER, assert_equal
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
)

EVERY_SECOND = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
"""Layers 0 and 2 have an indexer, 1 and 3 read what these chose."""
TOPK = 6
COEF = 0.5
TOLERANCE = 2e-6
"""Share of the largest gradient, as in test_indexer_loss.py."""
Case = tuple[dict[str, Any], str, str]
"""(layout, recompute, indexer_replay)"""
ALONE: list[Case] = [({}, "none", "none"), ({}, "none", "engine")]
QUICK: list[Case] = [
    ({"tp": 2, "ep": 2}, "full", "engine"),
    ({"pp": 2}, "full", "none"),
]
FURTHER: list[Case] = [
    ({"tp": 2, "pp": 2, "ep": 2}, "none", "engine"),
    ({"tp": 2, "cp": 2, "ep": 4}, "core_attn", "engine"),
    ({"cp": 2, "dp": 2}, "none", "none"),
]


def make_named_batches() -> list[TrainBatch]:
    """Return batches whose keys are an engine's: the same in layers that share an indexer."""
    batches = []
    for batch in with_random_keys(make_batches(), TOPK):
        assert batch.indexer_topk_TLK is not None
        chosen_TLK = batch.indexer_topk_TLK[:, ::2].repeat_interleave(2, 1)
        batches.append(replace(batch, indexer_topk_TLK=chosen_TLK))
    return batches


def run_case(rank: int, world_size: int, port: int, model: ModelConfig, case: Case) -> Any:
    """Return log-probs, the stats of a step, and its gradients."""
    layout, recompute, mode = case
    options = {"recompute": recompute, "indexer_replay": mode, "indexer_loss": COEF}
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **options)
    batches = my_batches(make_named_batches())
    scores = actor.compute_logprobs(batches)
    stats = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    return scores and [score.logprobs_T for score in scores], stats, boxed_gradients(actor)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("shared_indexers")
    return ModelConfig(path=str(write_model("glm5", folder, **EVERY_SECOND)))


@pytest.fixture(scope="module")
def alone(model: ModelConfig) -> dict[str, Any]:
    """Results of one process, by train.indexer_replay."""
    results = run_each(run_case, 1, ALONE, model)
    return {case[2]: result for case, (result,) in zip(ALONE, results, strict=True)}


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["none", "engine"])
def test_layers_read_what_the_indexer_before_them_chose(
    model: ModelConfig, alone: dict[str, Any], mode: str
) -> None:
    oracle = load_oracle(Path(model.path))
    logprobs, stats, boxed = alone[mode]
    batches = make_named_batches()
    for batch, got_T in zip(batches, logprobs, strict=True):
        parts = batch.indexer_topk_TLK.split(list(batch.lens_N))  # type: ignore[union-attr]
        for tokens, keys_TLK, of_sequence in zip(
            sequences_of(batch), parts, got_T.split(list(batch.lens_N)), strict=True
        ):
            if mode == "none":
                want = score(oracle, tokens)
            else:
                with use_given_keys(oracle, keys_TLK):
                    want = score(oracle, tokens)
            assert find_max_error([of_sequence], [want]) < 1e-5
    losses, gradients = compute_losses(oracle, batches, replay=mode == "engine")
    assert len(losses) == 2 and len(gradients) == 2 * 5
    assert stats.metrics["indexer/loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    named = {name for name in stats.metrics if name.endswith("/loss")}
    assert named == {"indexer/loss", "indexer/layer_00/loss", "indexer/layer_02/loss"}
    own = [(box, gradient) for box, gradient in boxed if ".indexer." in box.name]
    check_gradients([own], {name: COEF * g for name, g in gradients.items()}, mode, TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, QUICK, id="two_ranks", marks=pytest.mark.slow),
        pytest.param(4, FURTHER, id="four_ranks", marks=pytest.mark.slow),
    ],
)
def test_layouts_compute_what_one_process_does(
    model: ModelConfig, alone: dict[str, Any], num_ranks: int, cases: list[Case]
) -> None:
    for case, ranks in zip(cases, run_each(run_case, num_ranks, cases, model), strict=True):
        logprobs, stats, boxed = alone[case[2]]
        owners = [(found, step) for found, step, _ in ranks if found is not None]
        for dp, (found, step) in enumerate(owners):
            assert find_max_error(found, logprobs[dp :: len(owners)]) < 1e-5, case
            assert step.loss == pytest.approx(stats.loss, abs=1e-6), case
            assert step.grad_norm == pytest.approx(stats.grad_norm, rel=1e-5), case
            assert step.metrics == pytest.approx(stats.metrics, abs=1e-5), case
        wanted = whole_gradients(boxed)
        check_gradients([gradients for *_, gradients in ranks], wanted, case, TOLERANCE)


def save(rank: int, world_size: int, port: int, model: ModelConfig, step: Path) -> None:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), indexer_loss=COEF)
    actor.save(step, {})
    actor.finish_save()


def resume(rank: int, world_size: int, port: int, model: ModelConfig, step: Path) -> None:
    random = replace(model, init="random")
    parallel = ParallelConfig(pp=2, ep=1)
    actor = make_actor(rank, world_size, port, random, parallel, indexer_loss=COEF)
    actor.load(step)
    actor.export_hf(step.with_name("resumed"))


@pytest.mark.gloo
def test_a_checkpoint_without_dense_layers_is_resumed_and_merged(tmp_path: Path) -> None:
    """megatron-core would stack the indexers of all layers, as these differ in nothing else."""
    source = write_model("glm5", tmp_path / "model", first_k_dense_replace=0, **EVERY_SECOND)
    model, step = ModelConfig(path=str(source)), tmp_path / "step"
    run_ranks(save, 1, model, step)
    to_hf(step, source, tmp_path / "merged", None, None, LARGE, ONE_WORKER)
    run_ranks(resume, 2, model, step)
    for made in ("merged", "resumed"):
        assert_equal(tmp_path / made, source)
