"""A canary against a real engine: equal weights pass, other weights and a dead engine are named."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.config import CanaryConfig
from mcore_rl.players.canary import Canary
from mcore_rl.rollout.engine import EngineProcess, EngineSpec
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch, WeightVersion
from tests.support.engines import VOCAB_SIZE, save_tiny_moe

pytestmark = pytest.mark.e2e


class TransformersTrainer:
    """transformers in the place of the training ranks."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.model = model

    @torch.no_grad()
    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        assert options.temperature == 1.0
        parts = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            logprobs = self.model(tokens[None]).logits[0].log_softmax(-1)
            parts += [torch.zeros(1), logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]]
        return TokenScores(torch.cat(parts))

    def train_step(self, batch: TrainBatch) -> StepStats:
        raise NotImplementedError

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(
        EngineSpec(model_path, str(tmp_path_factory.mktemp("log") / "engine.log"))
    ) as engine:
        yield engine


def make_batch() -> TrainBatch:
    lens_N = (7, 12, 5)
    ids_T = torch.randint(3, VOCAB_SIZE, (sum(lens_N),), generator=torch.Generator().manual_seed(0))
    return TrainBatch(ids_T, torch.ones(sum(lens_N), dtype=torch.bool), lens_N)


async def ready() -> None:
    """Engines always are, here."""


def test_engines_that_compute_otherwise_are_named(model_path: str, engine: EngineProcess) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    canary = Canary(TransformersTrainer(model), CanaryConfig(), "float32", 20.0, asyncio.run, ready)
    absent = "http://127.0.0.1:9"
    report = canary.check(WeightVersion(5), make_batch(), [engine.url, absent])
    assert report.differences[engine.url] < 1e-4
    assert (
        set(report.failed) == {absent}
        and f"engine {absent} scored nothing" in report.failed[absent]
    )
    assert report.metrics()["sync/canary_diff"] == report.differences[engine.url]

    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.o_proj.weight").add_(0.05)
    report = canary.check(WeightVersion(6), make_batch(), [engine.url])
    assert report.differences[engine.url] > 1e-3
    assert (
        "claims weights 6" in report.failed[engine.url]
        and "canary.tolerance" in report.failed[engine.url]
    )

    nothing = Canary(
        TransformersTrainer(model), CanaryConfig(sequences=0), "float32", 20.0, asyncio.run, ready
    )
    assert nothing.check(WeightVersion(6), make_batch(), [engine.url]).metrics() == {}
