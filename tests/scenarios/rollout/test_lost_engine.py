"""A response whose engine is killed goes on elsewhere, as if nothing had been."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Sample
from tests.support.engines import save_tiny_moe, serve_versions
from tests.support.sampled import logprob_error, make_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG = RolloutConfig(
    engines=2, stream_every=16, deterministic=True, request_timeout_s=60.0, retries=3
)
SAMPLING = Sampling(400, seed=5)


def test_another_engine_goes_on_with_the_tokens_of_a_killed_one(tmp_path: Path) -> None:
    path = save_tiny_moe(tmp_path / "model")
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with serve_versions({7: path, 8: path}, tmp_path, deterministic=True) as engines:
        undisturbed = asyncio.run(draw(engines[1:], None))
        samples = asyncio.run(draw(engines, engines[0]))
    went_on = [sample for sample in samples if len(sample.versions) == 2]
    assert went_on, "the engine was to be killed within the responses"
    for sample in went_on:
        first, second = sample.versions
        assert (first.version, second.version) == (7, 8)
        assert 0 < first.stop == second.start < second.stop == sample.response_len
    assert [sample.response_ids for sample in samples] == [s.response_ids for s in undisturbed]
    assert logprob_error(model, samples) < 1e-4


async def draw(engines: list[EngineProcess], victim: EngineProcess | None) -> list[Sample]:
    """Return samples; `victim`, the first engine, is killed once responses are under way."""
    urls = [engine.url for engine in engines]
    health = EngineHealth(urls)
    others = dict.fromkeys(urls[1:], "it begins later")
    health.set_serving(urls[:1], others)
    transport = HttpOptions.make(CONFIG, [], lambda ids: " ".join(map(str, ids))).open
    client = RolloutClient([engine.address for engine in engines], CONFIG, transport, health)
    async with client.open() as session:
        work = asyncio.ensure_future(session.generate(make_prompts(4), 2, SAMPLING))
        if victim is not None:
            await asyncio.sleep(0.5)
            os.killpg(victim.pid, signal.SIGKILL)
            health.set_serving(urls[1:], {urls[0]: "it was killed"})
        return await work
