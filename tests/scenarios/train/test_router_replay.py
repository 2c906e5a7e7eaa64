"""Router replay on real ranks, in every layout.

Experts get the tokens that the batch names for them, and weigh them as transformers does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import moe_layers, read_hf_config
from tests.support.distributed import run_each, run_ranks
from tests.support.experts_seen import Watch, experts_by_token
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)

BATCHES = "replayed.pt"
TOP_K = {"qwen3_moe": 2, "deepseek_v3": 4, "qwen2_moe": 4, "glm4_moe": 4}
Case = tuple[str, dict[str, Any], str, str]
"""(model, layout, recompute, router_replay)"""
ALONE: list[Case] = [
    ("qwen3_moe", {}, "none", "engine"),
    ("qwen3_moe", {}, "none", "old_pass"),
    ("deepseek_v3", {}, "none", "engine"),
    ("qwen2_moe", {}, "none", "engine"),
    ("glm4_moe", {}, "none", "engine"),
]
CASES: list[Case] = [
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, "full", "engine"),
    ("qwen3_moe", {"pp": 2, "vpp": 2, "cp": 2}, "full", "engine"),
    ("qwen3_moe", {"tp": 2, "cp": 2, "ep": 4}, "selective", "engine"),
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, "full", "old_pass"),
    ("qwen3_moe", {"cp": 2, "pp": 2, "vpp": 2}, "none", "old_pass"),
    ("deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}, "none", "engine"),
    ("qwen2_moe", {"tp": 2, "cp": 2, "ep": 4}, "none", "engine"),
    ("glm4_moe", {"pp": 2, "vpp": 2, "ep": 2}, "none", "engine"),
]
Lane = tuple[list[Case], int, list[Case]]
"""(cases of one process, number of ranks, their cases)"""
QUICK: Lane = (
    ALONE[:3],
    2,
    [
        ("qwen3_moe", {"tp": 2, "ep": 2}, "full", "engine"),
        ("qwen3_moe", {"pp": 2, "vpp": 2}, "none", "old_pass"),
    ],
)
FURTHER: Lane = (ALONE, 4, CASES)


def numbered_batches(model: Path) -> list[TrainBatch]:
    """Return batches in which each token has a unique id and random experts.

    The last token of a sequence has no experts, as in an engine's record.
    """
    config = read_hf_config(model)
    dense = torch.tensor([not has_experts for has_experts in moe_layers(config)])
    generator, first, out = torch.Generator().manual_seed(5), 0, []
    for batch in make_batches():
        num_tokens = len(batch.token_ids_T)
        scores = torch.rand(num_tokens, len(dense), 8, generator=generator)
        experts_TLK = scores.topk(config["num_experts_per_tok"]).indices.to(torch.int16)
        experts_TLK[:, dense] = 0  # as engines answer
        experts_TLK[torch.tensor(batch.lens_N).cumsum(0) - 1] = -1
        fields = {
            "token_ids_T": torch.arange(first, first + num_tokens),
            "routed_experts_TLK": experts_TLK,
            "rollout_logprobs_T": torch.full((num_tokens,), -1.0),
            "stale_T": torch.zeros(num_tokens, dtype=torch.bool),
        }
        out.append(replace(batch, **fields))
        first += num_tokens
    return out


def everywhere(value: Any) -> Any:
    """Return the value of the owning rank of this data-parallel coordinate on all its ranks."""
    own_dp = ps.get_data_parallel_rank()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, (own_dp, value))
    return next(held for dp, held in values if dp == own_dp and held is not None)


def run_case(rank: int, world_size: int, port: int, folder: Path, case: Case) -> dict[str, Any]:
    kind, layout, recompute, mode = case
    model = ModelConfig(path=str(folder / kind))
    actor = make_actor(
        rank,
        world_size,
        port,
        model,
        ParallelConfig(**layout),
        recompute=recompute,
        router_replay=mode,
    )
    watch = Watch(actor)
    batches = my_batches(torch.load(folder / kind / BATCHES, weights_only=False))
    scores = actor.compute_logprobs(batches)
    seen = [watch.take()]
    if mode == "old_pass":
        recorded = everywhere(scores and [score.routed_experts_TLK for score in scores])
        batches = [
            replace(batch, routed_experts_TLK=experts, router_flips_T=flips_of(batch))
            for batch, experts in zip(batches, recorded, strict=True)
        ]
    steps = []
    for _ in range(2):
        stats = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        steps.append(stats)
        seen.append(watch.take())
    return {
        "dp": ps.get_data_parallel_rank(),
        "logprobs": scores and [score.logprobs_T for score in scores],
        "flips": scores and [score.router_flips_T for score in scores],
        "recorded": scores and [score.routed_experts_TLK for score in scores],
        "steps": steps,
        "seen": seen,
    }


def flips_of(batch: TrainBatch) -> Tensor:
    return torch.zeros(len(batch.token_ids_T), dtype=torch.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    write_hf_model(folder / "qwen3_moe")
    for kind in TOP_K:
        if kind != "qwen3_moe":
            write_model(kind, folder / kind)
        torch.save(numbered_batches(folder / kind), folder / kind / BATCHES)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(QUICK, id="quick"),
        pytest.param(FURTHER, id="further", marks=pytest.mark.slow),
    ],
)
def lane(request: pytest.FixtureRequest) -> Lane:
    return request.param


Alone = list[tuple[Case, dict[str, Any]]]
"""Each case of one process with its results."""


@pytest.fixture(scope="module")
def alone(folder: Path, lane: Lane) -> Alone:
    results = run_each(run_case, 1, lane[0], folder)
    return [(case, result) for case, (result,) in zip(lane[0], results, strict=True)]


@pytest.fixture(scope="module")
def cut(folder: Path, lane: Lane) -> list[tuple[Case, list[dict[str, Any]]]]:
    """Each case of several processes with its results by rank."""
    _, num_ranks, cases = lane
    return list(zip(cases, run_each(run_case, num_ranks, cases, folder), strict=True))


def check_experts(seen: Any, batches: list[TrainBatch], kind: str) -> None:
    """Check that exactly the experts a batch names computed on each token, in every layer."""
    experts = experts_by_token(seen)
    layers = sorted({layer for layer, _ in experts})
    assert len(layers) == (4 if kind == "qwen2_moe" else 3)
    for batch in batches:
        assert batch.routed_experts_TLK is not None
        for token, rows_LK in zip(
            batch.token_ids_T.tolist(), batch.routed_experts_TLK.tolist(), strict=True
        ):
            for layer in layers:
                got = experts[layer, token]
                assert len(got) == TOP_K[kind], (layer, token, got)
                assert rows_LK[layer][0] < 0 or got == set(rows_LK[layer]), (layer, token, got)


def batches_of(folder: Path, kind: str, results: Any, mode: str) -> list[TrainBatch]:
    """Return all micro-batches with the experts that train steps must have used."""
    batches = torch.load(folder / kind / BATCHES, weights_only=False)
    if mode == "engine":
        return batches
    owners = sorted((r for r in results if r["recorded"] is not None), key=lambda r: r["dp"])
    for dp, owner in enumerate(owners):
        for i, experts in zip(range(dp, len(batches), len(owners)), owner["recorded"], strict=True):
            batches[i] = replace(batches[i], routed_experts_TLK=experts)
    return batches


@pytest.mark.gloo
def test_experts_compute_on_the_tokens_that_the_batch_names(
    folder: Path, alone: Alone, cut: Any
) -> None:
    for case, results in [*((case, [result]) for case, result in alone), *cut]:
        kind, *_, mode = case
        wanted = batches_of(folder, kind, results, mode)
        for i in range(3):  # the pass for old log-probs and two train steps, recomputation included
            check_experts([r["seen"][i] for r in results], wanted, kind)
        stats = next(r["steps"] for r in results if r["steps"][0] is not None)
        if mode == "engine":
            assert all(s.metrics["logprob_diff/router_flip_share"] == 0 for s in stats), case
            assert all(s.metrics["router/replaced_share"] > 0.9 for s in stats), case
        else:
            assert stats[0].metrics["router/replaced_share"] == 0, case
            assert stats[1].metrics["router/replaced_share"] > 0, case
            flips = [f for r in results if r["flips"] for part in r["flips"] for f in part.tolist()]
            assert any(flips), "the pass for old log-probs took the engine's experts"


@pytest.mark.gloo
def test_layouts_compute_what_one_process_does(alone: Alone, cut: Any) -> None:
    for (kind, layout, _, mode), results in cut:
        whole = next(result for case, result in alone if (case[0], case[3]) == (kind, mode))
        owners = sorted((r for r in results if r["logprobs"] is not None), key=lambda r: r["dp"])
        assert len(owners) == ParallelConfig(**layout).dp_size
        for dp, owner in enumerate(owners):
            for got, want in zip(
                owner["logprobs"], whole["logprobs"][dp :: len(owners)], strict=True
            ):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            for got, want in zip(owner["steps"], whole["steps"], strict=True):
                assert got.loss == pytest.approx(want.loss, abs=1e-5), layout
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4), layout
            first, want = owner["steps"][0].metrics, whole["steps"][0].metrics
            assert first == pytest.approx(want, abs=1e-5), layout


@contextmanager
def given_experts(experts_LTK: list[Tensor], num_experts: int) -> Iterator[None]:
    """Make torch.topk over experts return the next layer's given experts where they are known."""
    layers, topk = iter(experts_LTK), torch.topk

    def choose(x: Tensor, k: int, **options: Any) -> Any:
        values, own = topk(x, k=k, **options)
        if (
            x.shape[-1] != num_experts or x.dim() > 2
        ):  # not a choice of experts, or one within groups
            return values, own
        given = next(layers)
        taken = torch.where(given >= 0, given, own)
        return x.gather(-1, taken), taken

    with patch("torch.topk", choose):
        yield
    assert next(layers, None) is None


def test_experts_are_weighed_as_transformers_would(folder: Path, alone: Alone) -> None:
    for (kind, *_, mode), result in alone:
        if mode == "engine":
            check_log_probs(folder / kind, result)


def check_log_probs(path: Path, got: dict[str, Any]) -> None:
    """Compare log-probs with those of transformers, which is given the same experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    layers = [i for i, has_experts in enumerate(moe_layers(read_hf_config(path))) if has_experts]
    for batch, logprobs_T in zip(
        torch.load(path / BATCHES, weights_only=False), got["logprobs"], strict=True
    ):
        first = 0
        for length in batch.lens_N:
            rows, ids = slice(first, first + length), batch.token_ids_T[first : first + length]
            given = [batch.routed_experts_TLK[rows, layer].long() for layer in layers]
            with given_experts(given, 8), torch.no_grad():
                logits = model(ids[None]).logits[0]
            want = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(logprobs_T[rows][1:], want, rtol=0, atol=1e-4)
            first += length


def wrong_layers(rank: int, world_size: int, port: int, folder: Path) -> None:
    actor = make_actor(
        rank,
        world_size,
        port,
        ModelConfig(path=str(folder / "qwen3_moe")),
        ParallelConfig(),
        router_replay="engine",
    )
    batches = torch.load(folder / "qwen3_moe" / BATCHES, weights_only=False)
    fewer = [replace(b, routed_experts_TLK=b.routed_experts_TLK[:, :3]) for b in batches]
    with pytest.raises(
        ValueError, match="routed experts of 3 layers and 2 experts per token, but the model has 4"
    ):
        actor.compute_logprobs(fewer)
    none = [replace(b, routed_experts_TLK=None) for b in batches]
    with pytest.raises(
        ValueError, match=r"train.router_replay=engine, but a micro-batch has no routed experts"
    ):
        actor.train_step(none, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def test_experts_that_cannot_be_replayed_are_refused(folder: Path) -> None:
    run_ranks(wrong_layers, 1, folder)
