"""Groups of episodes are drawn from engines, with a seed and an engine's prefix for each turn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.episode_sampling import EpisodeSampler
from mcore_rl.cluster.episode_spec import EpisodeSpec
from mcore_rl.config import AgentsConfig, RolloutConfig
from mcore_rl.data.calculator import CHAT_TEMPLATE, vocabulary
from mcore_rl.data.decoding import make_decode
from mcore_rl.data.tiny_model import write_tiny_model
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt, Sample
from tests.agents.environments import episodes
from tests.support.fake_sglang import FakeSGLang

PROMPT = Prompt(7, (3, 4), ({"role": "user", "content": "what is 1 + 2 ?"},), "unit", "3")


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def engine(loop: EventLoop) -> Iterator[FakeSGLang]:
    engine = FakeSGLang(loop)
    yield engine
    engine.stop()


def play(
    loop: EventLoop, engine: FakeSGLang, folder: Path, num_samples: int, **changes: Any
) -> list[Sample]:
    write_tiny_model(folder / "model", vocabulary(), CHAT_TEMPLATE, ("<|tool|>",))
    agents = AgentsConfig(
        environment=f"{episodes.HERE}:Countdown",
        tool_parser="none",
        reasoning_parser="none",
        **changes,
    )
    spec = EpisodeSpec(
        agents, str(folder / "model"), False, "Qwen3MoeForCausalLM", (1,), 200, 4, folder / "logs"
    )
    decode = make_decode(load_tokenizer(folder / "model", "model.path"))
    rollout = RolloutConfig(deterministic=True)

    async def ask_nobody(path: str, body: object) -> dict[str, Any]:
        raise AssertionError(f"no parser is asked, not {path}")

    async def run() -> list[Sample]:
        sampler = EpisodeSampler(spec, "collector_0", decode, ask_nobody)
        await sampler.start()
        client = RolloutClient([engine.address], rollout, HttpOptions.of(rollout, [1], decode).open)
        try:
            async with client.open() as session:
                request = GroupRequest(0, 5, PROMPT, num_samples, Sampling(4, seed=2))
                return await sampler.sample_group(session, request)
        finally:
            await sampler.close()

    return loop.run(run())


def test_each_turn_is_a_request_of_its_own(
    loop: EventLoop, engine: FakeSGLang, tmp_path: Path
) -> None:
    samples = play(loop, engine, tmp_path, 2)
    assert [sample.sample_index for sample in samples] == [0, 1]
    assert {sample.finish_reason for sample in samples} == {"done"}
    assert [sample.response_len for sample in samples] == [12, 12]
    assert len(engine.sampled) == 6
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.sampled]
    assert len(set(seeds)) == 6
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.sampled} == {4}
    contexts = sorted((tuple(body["input_ids"]) for body in engine.sampled), key=len)
    for shorter, longer in zip(contexts[::2], contexts[2::2], strict=False):
        assert longer[: len(shorter)] == shorter
    for sample in samples:
        assert sample.episode is not None and len(sample.episode.rows) == 1


def test_a_history_of_one_answer_makes_a_row_of_each(
    loop: EventLoop, engine: FakeSGLang, tmp_path: Path
) -> None:
    [sample] = play(loop, engine, tmp_path, 1, history=1)
    assert sample.episode is not None and len(sample.episode.rows) == 2
