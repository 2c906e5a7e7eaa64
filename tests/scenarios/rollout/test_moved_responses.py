"""A response that moves to another engine is one response, with the log-probs of the model."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.request import RoutedExpertsShape, Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Sample
from tests.support.engines import save_tiny_moe, serve_versions
from tests.support.sampled import logprob_error, make_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIG = RolloutConfig(engines=2, migration_gap=2, request_timeout_s=120.0)


def test_responses_move_to_an_idle_engine_and_go_on(tmp_path: Path) -> None:
    """The first engine gets all requests, as the second is out of rotation until they are begun."""
    path = save_tiny_moe(tmp_path / "model")
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with serve_versions({7: path, 8: path}, tmp_path) as engines:
        samples, num_moved = draw_with_moves(engines)
    assert num_moved >= 1
    versions = {span.version for drawn in samples for span in drawn.versions}
    assert versions == {7, 8}
    for drawn in samples:
        stops = [span.stop for span in drawn.versions]
        assert [span.start for span in drawn.versions] == [0, *stops[:-1]]
        assert stops[-1] == drawn.response_len
    assert logprob_error(model, samples) < 1e-4


def draw_with_moves(
    engines: list[EngineProcess],
    shape: RoutedExpertsShape | None = None,
    key_shape: IndexerTopkShape | None = None,
) -> tuple[list[Sample], int]:
    """Return samples of which all began on the first engine, and how many moved.

    shape, key_shape   of the experts and chosen keys that the engines report; None asks for none
    """
    first, second = engines
    health = EngineHealth([first.url, second.url])
    health.set_serving([first.url], {second.url: "it begins later"})
    shapes = shape, key_shape
    transport = HttpOptions.make(CONFIG, [], lambda ids: " ".join(map(str, ids)), *shapes).open
    client = RolloutClient([first.address, second.address], CONFIG, transport, health)
    sampling = Sampling(300, routed_experts=shape is not None, indexer_topk=key_shape is not None)
    short = Sampling(max_response_len=4)

    async def draw() -> list[Sample]:
        async with client.open() as session:
            work = asyncio.ensure_future(session.generate(make_prompts(4), 2, sampling))
            await asyncio.sleep(0.1)
            health.set_serving([first.url, second.url], {})
            # Any response that ends makes the client compare the engines.
            await session.generate(make_prompts(1), 1, short)
            return await work

    return asyncio.run(draw()), client.num_moved
