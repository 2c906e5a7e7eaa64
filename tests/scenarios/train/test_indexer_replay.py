"""Replay of the keys that engines attended to, in every layout, beside transformers with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from safetensors.torch import load_file, save_file

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_each, run_ranks
from tests.support.indexers import (
    find_max_error,
    load_oracle,
    score,
    score_and_choose,
    sequences_of,
    use_given_keys,
    with_random_keys,
)
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
)

TOPK = 6
RANDOM, NOISY = "random.pt", "noisy.pt"
"""Batches with random keys; with those that rounded indexers chose."""
Case = tuple[str, dict[str, Any], str, str]
"""(model, layout, recompute, indexer_replay)"""
ALONE: list[Case] = [
    ("deepseek_v32", {}, "none", "engine"),
    ("deepseek_v32", {}, "none", "none"),
    ("glm5", {}, "none", "engine"),
]
QUICK: list[Case] = [
    ("deepseek_v32", {"tp": 2, "ep": 2}, "full", "engine"),
    ("deepseek_v32", {"pp": 2}, "full", "none"),
]
FURTHER: list[Case] = [
    ("deepseek_v32", {"tp": 2, "pp": 2, "ep": 2}, "none", "engine"),
    ("deepseek_v32", {"pp": 2, "vpp": 2, "ep": 2}, "full", "engine"),
    ("deepseek_v32", {"tp": 2, "cp": 2, "ep": 4}, "core_attn", "engine"),
    ("deepseek_v32", {"tp": 2, "cp": 2, "ep": 4}, "none", "none"),
    ("glm5", {"cp": 2, "dp": 2}, "none", "engine"),
]


def run_case(rank: int, world_size: int, port: int, folder: Path, case: Case) -> dict[str, Any]:
    kind, layout, recompute, mode = case
    model = ModelConfig(path=str(folder / kind))
    parallel = ParallelConfig(**layout)
    actor = make_actor(
        rank, world_size, port, model, parallel, recompute=recompute, indexer_replay=mode
    )
    results: dict[str, Any] = {"dp": ps.get_data_parallel_rank()}
    for name in (NOISY, RANDOM):
        batches = my_batches(torch.load(folder / kind / name, weights_only=False))
        scores = actor.compute_logprobs(batches)
        results[name] = scores and [score.logprobs_T for score in scores]
    results["step"] = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    return results


def score_rounded(path: Path, batches: list[TrainBatch]) -> list[TrainBatch]:
    """Return the batches with log-probs and keys of the same model with indexers in FP8."""
    rounded = path.with_name(path.name + "_rounded")
    rounded.mkdir()
    (rounded / "config.json").write_bytes((path / "config.json").read_bytes())
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if ".indexer.w" in name:
            weights[name] = weights[name].to(torch.float8_e4m3fn).float()
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    model, out = load_oracle(rounded), []
    for batch in batches:
        scored = [score_and_choose(model, tokens, TOPK) for tokens in sequences_of(batch)]
        for _, keys_TLK in scored:
            keys_TLK[-1] = -1
        logprobs, keys = (torch.cat(parts) for parts in zip(*scored, strict=True))
        out.append(replace(batch, rollout_logprobs_T=logprobs, indexer_topk_TLK=keys))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexers")
    for kind in ("deepseek_v32", "glm5"):
        path = write_model(kind, folder / kind)
        torch.save(with_random_keys(make_batches(), TOPK), path / RANDOM)
        torch.save(score_rounded(path, make_batches()), path / NOISY)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    results = run_each(run_case, 1, ALONE, folder)
    return {(case[0], case[3]): result for case, (result,) in zip(ALONE, results, strict=True)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, QUICK), id="two_ranks"),
        pytest.param((4, FURTHER), id="four_ranks", marks=pytest.mark.slow),
    ],
)
def cut(folder: Path, request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, Any]]]]:
    num_ranks, cases = request.param
    return list(zip(cases, run_each(run_case, num_ranks, cases, folder), strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm5"])
def test_tokens_attend_to_the_keys_that_the_batch_names(
    folder: Path, alone: Any, kind: str
) -> None:
    model = load_oracle(folder / kind)
    for batch, got in zip(
        torch.load(folder / kind / RANDOM, weights_only=False),
        alone[kind, "engine"][RANDOM],
        strict=True,
    ):
        parts = batch.indexer_topk_TLK.split(list(batch.lens_N))
        for tokens, keys_TLK, logprobs_T in zip(
            sequences_of(batch), parts, got.split(list(batch.lens_N)), strict=True
        ):
            with use_given_keys(model, keys_TLK):
                want = score(model, tokens)
            assert find_max_error([logprobs_T], [want]) < 1e-5
            if len(tokens) > TOPK + 2:
                assert find_max_error([logprobs_T], [score(model, tokens)]) > 0.01


@pytest.mark.gloo
def test_layouts_compute_what_one_process_does(alone: Any, cut: Any) -> None:
    for (kind, layout, _, mode), results in cut:
        whole = alone[kind, mode]
        owners = sorted((r for r in results if r[RANDOM] is not None), key=lambda r: r["dp"])
        assert len(owners) == ParallelConfig(**layout).dp_size
        for dp, owner in enumerate(owners):
            for name in (NOISY, RANDOM):
                assert find_max_error(owner[name], whole[name][dp :: len(owners)]) < 1e-5, layout
            got, want = owner["step"], whole["step"]
            assert got.loss == pytest.approx(want.loss, abs=1e-6), layout
            assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5), layout
            assert got.metrics == pytest.approx(want.metrics, abs=1e-5), layout


@pytest.mark.gloo
def test_without_a_replay_differences_are_counted(folder: Path, alone: Any) -> None:
    model = load_oracle(folder / "deepseek_v32")
    given = left_out = torch.zeros(4)
    for batch in torch.load(folder / "deepseek_v32" / RANDOM, weights_only=False):
        parts = batch.indexer_topk_TLK.split(list(batch.lens_N))
        for tokens, keys_TLK in zip(sequences_of(batch), parts, strict=True):
            _, own_TLK = score_and_choose(model, tokens, TOPK)
            is_given = keys_TLK >= 0
            is_own = (keys_TLK[..., None] == own_TLK[:, :, None]).any(-1)
            given = given + is_given.sum((0, 2))
            left_out = left_out + (is_given & ~is_own).sum((0, 2))
    metrics = alone["deepseek_v32", "none"]["step"].metrics
    for layer, share in enumerate((left_out / given).tolist()):
        assert metrics[f"indexer/layer_{layer:02d}/differing_share"] == pytest.approx(share)
    share = float(left_out.sum() / given.sum())
    assert metrics["indexer/differing_share"] == pytest.approx(share) and share > 0.1
    replayed = alone["deepseek_v32", "engine"]["step"].metrics
    assert not [name for name in replayed if name.startswith("indexer/")]


@pytest.mark.gloo
def test_a_replay_takes_away_what_rounded_indexers_change(folder: Path, alone: Any) -> None:
    engine = [
        batch.rollout_logprobs_T
        for batch in torch.load(folder / "deepseek_v32" / NOISY, weights_only=False)
    ]

    def mean(mode: str) -> float:
        got = alone["deepseek_v32", mode][NOISY]
        return float((torch.cat(got) - torch.cat(engine)).abs().mean())

    assert mean("none") > 1e-3
    assert mean("engine") < mean("none") / 1000


def refuse_wrong_keys(rank: int, world_size: int, port: int, folder: Path) -> None:
    model = ModelConfig(path=str(folder / "deepseek_v32"))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), indexer_replay="engine")
    batches = torch.load(folder / "deepseek_v32" / RANDOM, weights_only=False)
    fewer = [replace(b, indexer_topk_TLK=b.indexer_topk_TLK[:, :3]) for b in batches]
    with pytest.raises(ValueError, match=r"keys of 3 layers and 6 keys per token.* has 4 and 6"):
        actor.compute_logprobs(fewer)
    none = [replace(b, indexer_topk_TLK=None) for b in batches]
    with pytest.raises(ValueError, match=r"train.indexer_replay=engine, but a micro-batch has no"):
        actor.train_step(none, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


@pytest.mark.gloo
def test_keys_that_cannot_be_replayed_are_refused(folder: Path) -> None:
    run_ranks(refuse_wrong_keys, 1, folder)
