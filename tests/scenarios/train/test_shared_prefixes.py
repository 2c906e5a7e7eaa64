"""A common beginning that is computed once gives the log-probs and gradients of separate ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_each
from tests.support.gradients import Boxed, boxed_gradients, check_gradients, whole_gradients
from tests.support.tiny_models import MODELS, write_model
from tests.support.tiny_training import (
    make_actor,
    token_loss,
    with_engine_records,
    write_hf_model,
)

OPTIONS: Mapping[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "attention again": {"recompute": "core_attn"},
}
Case = tuple[str, dict[str, Any], bool]
"""(kind of model, options of training, whether beginnings are shared)"""


def latent(kind: str) -> bool:
    return kind in ("deepseek_v2", "deepseek_v3", "moonlight", "kimi_k2")


LINEAR = ("qwen3_next", "qwen3_5")
"""Kinds with linear attention, which shares no beginnings."""
REPLAYED = "of four layers, one dense"
KINDS = [kind for kind in MODELS if not latent(kind) and not kind.startswith(LINEAR)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {}),
    ("qwen3_moe", OPTIONS["recompute"]),
    (REPLAYED, {"router_replay": "engine"}),
    *((kind, {}) for kind in KINDS if kind != "gpt_oss"),
    ("qwen3_moe", OPTIONS["attention again"]),
    (REPLAYED, {"router_replay": "old_pass"}),
]
"""(kind of model, options of training); the first three are of `make test`"""


def make_groups() -> list[TrainBatch]:
    """Return two groups of responses, one of which forks after some tokens of another."""
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> Tensor:
        return torch.randint(0, 90, (num,), generator=generator)

    batches = []
    for prompt_len, lens in ((12, (3, 7, 1, 5)), (6, (9, 2))):
        prompt = ids(prompt_len)
        rows = [torch.cat([prompt, ids(num)]) for num in lens]
        masks = [torch.arange(len(row)) >= prompt_len for row in rows]
        rows.append(torch.cat([rows[0][:-1], ids(4)]))
        masks.append(torch.arange(len(rows[-1])) >= len(rows[0]))
        mask_T = torch.cat(masks)
        batches.append(
            TrainBatch(
                token_ids_T=torch.cat(rows),
                loss_mask_T=mask_T,
                lens_N=tuple(len(row) for row in rows),
                loss_weights_T=mask_T / 30.0,
                advantages_T=torch.randn(len(mask_T), generator=generator),
            )
        )
    return batches


def run_case(
    rank: int, world_size: int, port: int, folder: Path, case: Case
) -> tuple[list[Tensor], list[int], Boxed, float]:
    """Return (log-probs, tokens that were computed, gradients, loss)."""
    kind, options, share = case
    model = ModelConfig(path=str(folder / kind))
    train = {"router_aux_loss_coef": 0.0, "share_prefixes": share, **options}
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), **train)
    batches = make_groups()
    replay = options.get("router_replay")
    if replay == "engine":
        batches, _ = with_engine_records(batches, folder / kind)
        batches = [of_first_rows(batch) for batch in batches]
    scores = actor.compute_logprobs(batches)
    assert scores is not None
    if replay == "old_pass":
        taken = [score.routed_experts_TLK for score in scores]
        batches = [replace(b, routed_experts_TLK=e) for b, e in zip(batches, taken, strict=True)]
    num_tokens = sum(len(batch.token_ids_T) for batch in batches)
    stats = actor.train_step(batches, token_loss, temperature=1.0, num_tokens=num_tokens)
    assert stats is not None
    computed = nums_computed(actor, batches)
    logprobs = [score.logprobs_T for score in scores]
    return logprobs, computed, boxed_gradients(actor), stats.loss


def nums_computed(actor: Actor, batches: list[TrainBatch]) -> list[int]:
    return [len(batch.tokens_T) for batch in actor._rank_batches(batches)]


def of_first_rows(batch: TrainBatch) -> TrainBatch:
    """Return the batch whose rows name the experts of the first where they share its tokens."""
    assert batch.routed_experts_TLK is not None
    experts = list(batch.routed_experts_TLK.clone().split(list(batch.lens_N)))
    rows = batch.token_ids_T.split(list(batch.lens_N))
    for n, row in enumerate(rows[1:], 1):
        both = min(len(row), len(rows[0])) - 1
        same = int((row[:both] == rows[0][:both]).long().cumprod(0).sum())
        experts[n][:same] = experts[0][:same]
    return replace(batch, routed_experts_TLK=torch.cat(experts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for kind in MODELS:
        write_model(kind, folder / kind)
    write_hf_model(folder / REPLAYED)
    return folder


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[:3], id="quick"),
        pytest.param(CASES[3:], id="further", marks=pytest.mark.slow),
    ],
)
def test_log_probs_and_gradients_are_those_of_separate_rows(
    folder: Path, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    runs = [(kind, options, share) for kind, options in cases for share in (False, True)]
    results = run_each(run_case, 1, runs, folder)
    for i, case in enumerate(cases):
        [(wanted, whole, gradients, loss)], [(found, computed, own, own_loss)] = results[
            2 * i : 2 * i + 2
        ]
        assert whole == [82, 41] and computed == [82 - 3 * 11 - 13, 41 - 5 - 13], case
        for want, got in zip(wanted, found, strict=True):
            assert (want - got).abs().max() < 1e-5, case
        assert own_loss == pytest.approx(loss, abs=1e-6), case
        check_gradients([own], whole_gradients(gradients), case, 2e-6)


@pytest.mark.parametrize(
    ("kind", "parallel", "message"),
    [
        ("deepseek_v3", {}, "share_prefixes=true with deepseek_v3: a model with latent attention"),
        ("qwen3_moe", {"cp": 2}, "share_prefixes=true with parallel.cp=2: context parallelism"),
    ],
)
def test_models_and_layouts_that_cannot_share_are_named(
    folder: Path, kind: str, parallel: dict[str, Any], message: str
) -> None:
    config = read_hf_config(folder / kind)
    assert bool(family_of(config).options(config).get("multi_latent_attention")) == latent(kind)
    train = TrainConfig(share_prefixes=True)
    with pytest.raises(ValueError, match=message):
        make_transformer_config(config, ParallelConfig(**parallel), torch.float32, train)
