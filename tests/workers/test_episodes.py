"""Groups of episodes are drawn from engines, with a seed and an engine's prefix for each turn."""

import asyncio
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.recorder import TurnRequest
from mcore_rl.config import AgentsConfig, RolloutConfig
from mcore_rl.data.decoding import make_decode
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import EngineAffinity, Request, Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.tasks.calculator import CHAT_TEMPLATE, vocabulary
from mcore_rl.tasks.tiny_models import write_tiny_model
from mcore_rl.types import Prompt, Sample
from mcore_rl.workers.episodes import EpisodeSampler, EpisodeSpec, make_turn_sampler
from tests.agents.environments import episodes
from tests.support.fake_sglang import FakeSGLang
from tests.support.gateways import until

SHORT = Sampling(1)
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


@pytest.fixture
def second_engine(loop: EventLoop) -> Iterator[FakeSGLang]:
    engine = FakeSGLang(loop)
    yield engine
    engine.stop()


def play(
    loop: EventLoop,
    engine: FakeSGLang,
    folder: Path,
    num_samples: int,
    *others: FakeSGLang,
    **changes: Any,
) -> list[Sample]:
    write_tiny_model(folder / "model", vocabulary(), CHAT_TEMPLATE, ("<|tool|>",))
    changes = {"environment": f"{episodes.HERE}:Countdown", **changes}
    agents = AgentsConfig(tool_parser="none", reasoning_parser="none", **changes)
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
        engines = [one.address for one in (engine, *others)]
        client = RolloutClient(engines, rollout, HttpOptions.make(rollout, [1], decode).open)
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


TALKER = """
import hashlib, json, os, urllib.request
name = int(hashlib.sha256(os.environ["OPENAI_API_KEY"].encode()).hexdigest(), 16) % 10**9
messages = []
for number in range(4):
    messages.append({"role": "user", "content": " ".join(f"{name}{number}")})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))
    messages.append(answer["choices"][0]["message"])
print(json.dumps({"reward": 1.0}))
"""
"""A program that talks with the policy for four turns, in words that differ between episodes."""


def contexts_of(*engines: FakeSGLang) -> list[list[tuple[int, ...]]]:
    return [[tuple(body["input_ids"]) for body in engine.sampled] for engine in engines]


def continues(context: tuple[int, ...], earlier: list[tuple[int, ...]]) -> bool:
    """Return whether an earlier context, of any turn before, begins this one."""
    return any(context[: len(one)] == one for one in earlier if len(one) < len(context))


def test_a_programs_session_stays_on_the_engine_that_has_its_prefix(
    loop: EventLoop, engine: FakeSGLang, second_engine: FakeSGLang, tmp_path: Path
) -> None:
    """Each program asks at its own pace, so the engines differ in load all the time."""
    before = gc.get_threshold()
    within: set[tuple[int, int, int]] = set()

    def note(body: Any) -> None:
        within.add(gc.get_threshold())

    engine.answer = second_engine.answer = note
    options = {"command": [sys.executable, "-c", TALKER]}
    samples = play(loop, engine, tmp_path, 4, second_engine, environment="command", options=options)
    assert [sample.finish_reason for sample in samples] == ["done"] * 4
    assert gc.get_threshold() == before and before not in within
    firsts: list[tuple[int, ...]] = []
    for contexts in contexts_of(engine, second_engine):
        assert len(contexts) % 4 == 0
        firsts += [one for one in contexts if not continues(one, contexts)]
    assert len(firsts) == len(set(firsts)) == 4
    for sample in samples:
        assert sample.episode is not None and len(sample.episode.rows) == 1
        assert sample.episode.metrics["refused"] == 0


def test_a_session_leaves_an_engine_that_fails(
    loop: EventLoop, engine: FakeSGLang, second_engine: FakeSGLang, tmp_path: Path
) -> None:
    def fail_from_the_third(body: Any) -> tuple[int, str] | None:
        return (500, "dead") if len(engine.sampled) > 2 else None

    engine.answer = fail_from_the_third
    options = {"command": [sys.executable, "-c", TALKER]}
    [sample] = play(
        loop, engine, tmp_path, 1, second_engine, environment="command", options=options
    )
    assert sample.finish_reason == "done"
    assert [len(contexts) for contexts in contexts_of(engine, second_engine)] == [3, 2]


@pytest.mark.parametrize("num_others", [2, 3])
def test_a_session_leaves_an_engine_with_as_many_more_requests_as_its_group_has(
    loop: EventLoop, engine: FakeSGLang, second_engine: FakeSGLang, num_others: int
) -> None:
    """One less, and it stays for its prefix. It does not go back once the other is idle again."""
    rollout = RolloutConfig()
    health = EngineHealth([engine.url, second_engine.url])
    transport = HttpOptions.make(rollout, [1], str).open
    client = RolloutClient([engine.address, second_engine.address], rollout, transport, health)
    engine.num_free = 1

    async def run() -> None:
        async with asyncio.timeout(60), client.open() as session:
            ask = make_turn_sampler(session, GroupRequest(0, 5, PROMPT, 3, Sampling(4)), 0)
            await ask(turn(0))
            health.set_serving([engine.url], {second_engine.url: "the others go to the first"})
            others = [
                asyncio.create_task(session.sample(Request(PROMPT, 0, EngineAffinity(1)), SHORT))
                for _ in range(num_others)
            ]
            await until(lambda: len(engine.sampled) == 1 + num_others)
            health.set_serving([engine.url, second_engine.url], {})
            later = asyncio.ensure_future(ask(turn(1)))
            await until(lambda: len(engine.sampled) + len(second_engine.sampled) > 1 + num_others)
            await engine.let_go()
            await asyncio.gather(later, *others)
            await ask(turn(2))

    loop.run(run())
    turns = [len(body["input_ids"]) - len(PROMPT.token_ids) for body in second_engine.sampled]
    assert turns == ([] if num_others < 3 else [1, 2])


def turn(number: int) -> TurnRequest:
    """A turn whose context is `number` tokens longer than the prompt."""
    return TurnRequest(number, PROMPT.token_ids + (9,) * number, 4, (), 0)
