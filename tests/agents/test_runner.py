"""Every episode ends with exactly one reason, whatever environment and policy do."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from mcore_rl.agents.gateway.admission import AdmissionOptions, GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.messages import (
    Answer,
    CallAttempt,
    CallStatus,
    EndReason,
    Tool,
    keep_last_answers,
)
from mcore_rl.agents.recorder import EpisodeLimits, Parser, TurnRequest
from mcore_rl.agents.runner import EpisodeRunner, RunnerOptions
from mcore_rl.types import Prompt, Sample
from tests.agents.environments import episodes
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.stand_in_policy import PlainParser, StandInPolicy

COUNTDOWN = f"{episodes.HERE}:Countdown"
PROMPT = Prompt(7, (1, 2), ({"role": "user", "content": "count"},), "unit", "0")
ROOMY = EpisodeLimits(max_turns=50, max_turn_len=50, max_tokens=10_000)
TOKENIZER: Any = make_tokenizer("qwen3")


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


class FailingEngines:
    """The policy's first answers, each after some seconds, and then an error of the engines."""

    def __init__(self, policy: StandInPolicy, num_answers: int, answer_s: float) -> None:
        self._policy = policy
        self._answer_s = answer_s
        self._num_left = num_answers

    async def __call__(self, turn: TurnRequest) -> Sample:
        self._num_left -= 1
        if self._num_left < 0:
            raise RuntimeError("no engine serves")
        await asyncio.sleep(self._answer_s)
        return await self._policy(turn)


def play(
    texts: Sequence[str],
    kind: str = COUNTDOWN,
    limits: EpisodeLimits = ROOMY,
    deadline_s: float = 30.0,
    parser: Parser | None = None,
    prompt: Prompt = PROMPT,
    compaction: Callable[..., Any] | None = None,
    num_answers: int = 1000,
    answer_s: float = 0.0,
    max_requests: int = 0,
    **options: Any,
) -> tuple[Sample, StandInPolicy]:
    """Play one episode with a policy that says `texts`, in real worker processes.

    The engines fail all requests after the first `num_answers`. The gateway takes `max_requests` at
    once; 0: any number.
    """
    encode = partial(TOKENIZER.encode, add_special_tokens=False)
    policy = StandInPolicy(texts, encode, stop_ids("qwen3")[0])
    chat = ChatFormat(TOKENIZER, stop_ids("qwen3"), reasoning="template", template_options={})
    runner_options = RunnerOptions(limits, deadline_s, 2, compaction)

    async def run() -> Sample:
        pool = EnvironmentPool(EnvironmentOptions(kind=kind, workers=1, **options))
        bounds = GatewayOptions(admission=AdmissionOptions(max_requests))
        async with pool, Gateway(lambda token: decode([token]), bounds) as gateway:
            parsed = parser or PlainParser(decode)
            runner = EpisodeRunner(kind, pool, chat, parsed, decode, runner_options, gateway)
            engines = FailingEngines(policy, num_answers, answer_s)
            return await runner.run(prompt, 3, 11, engines)

    return asyncio.run(run()), policy


def test_an_episode_goes_on_until_its_environment_is_done() -> None:
    sample, policy = play(["one", "two", "three"])
    assert sample.finish_reason == "done" and sample.sample_index == 3
    episode = sample.episode
    assert episode is not None and len(episode.rows) == 1
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0, 1.0] and episode.reward == 3.0
    assert [turn.answer["content"] for turn in episode.turns] == ["one", "two", "three"]
    assert episode.turns[1].messages == ({"role": "user", "content": "2 left"},)
    assert sample.response_ids == tuple(token for ids in policy.answers for token in ids)
    assert sample.response_len == episode.rows[0].num_trained
    assert sample.text.startswith("one") and "2 left" in sample.text
    assert episode.metrics["same_thread"] == 1.0


@pytest.mark.parametrize(
    ("texts", "options", "reason", "num_turns"),
    [
        (["RAISE now"], {}, "env_error", 1),
        (["go", "DIE"], {}, "env_error", 0),
        (["END tool_error"], {}, "tool_error", 1),
        (["END of the world"], {}, "env_error", 1),
        (["END aborted"], {}, "env_error", 1),
        (["go"], {"limits": EpisodeLimits(2, 50, 10_000)}, "max_turns", 2),
        (["go on and on"], {"limits": EpisodeLimits(9, 50, 45)}, "max_tokens", 2),
        (["SLEEP 60"], {"deadline_s": 2.0}, "deadline", 1),
        (["SLEEP 20"], {"step_timeout_s": 0.5}, "env_error", 1),
    ],
)
def test_reasons(texts: list[str], options: dict[str, Any], reason: str, num_turns: int) -> None:
    sample, _ = play(texts, **options)
    assert sample.finish_reason == reason, sample.episode
    assert sample.episode is not None and len(sample.episode.turns) == num_turns


@pytest.mark.parametrize(("test_every", "is_test"), [(2, 1.0), (3, 0.0)])
def test_an_answer_that_is_cut_off_has_the_numbers_that_its_episode_began_with(
    test_every: int, is_test: float
) -> None:
    """The environment never sees the answer; the rewards of CURE need its role all the same."""
    limits = EpisodeLimits(1, 50, 60)
    settings = {"test_every": test_every, "test_text": "test: "}
    sample, _ = play(["go " * 60], "cure", limits, options=settings)
    assert sample.finish_reason == "max_tokens" and sample.episode is not None
    assert sample.sample_index == 3 and sample.episode.metrics == {"is_test": is_test}


def test_a_wait_for_a_place_does_not_count_towards_the_deadline() -> None:
    """Sixteen episodes of a quarter of a second, one after another: all of them take 4 s."""
    encode = partial(TOKENIZER.encode, add_special_tokens=False)
    chat = ChatFormat(TOKENIZER, stop_ids("qwen3"), reasoning="template", template_options={})
    options = RunnerOptions(ROOMY, 3.5, 2)

    async def run() -> list[Sample]:
        async with EnvironmentPool(
            EnvironmentOptions(kind=COUNTDOWN, workers=1, episodes_per_worker=1)
        ) as pool:
            runner = EpisodeRunner(COUNTDOWN, pool, chat, PlainParser(decode), decode, options)
            policies = [
                StandInPolicy(["SLEEP 0.25", "go"], encode, stop_ids("qwen3")[0]) for _ in range(16)
            ]
            plays = (runner.run(PROMPT, i, i, policy) for i, policy in enumerate(policies))
            return await asyncio.gather(*plays)

    assert [sample.finish_reason for sample in asyncio.run(run())] == ["done"] * 16


def test_an_environment_that_is_lost_is_tried_once_more() -> None:
    sample, policy = play(["go", "DIE", "go", "go", "go"])
    assert sample.finish_reason == "done" and len(policy.asked) == 5
    assert sample.episode is not None and len(sample.episode.turns) == 3


def test_a_shortened_history_is_a_row_per_answer() -> None:
    sample, policy = play(["one", "two", "three"], compaction=partial(keep_last_answers, number=1))
    assert sample.episode is not None
    assert [turn.fork for turn in sample.episode.turns] == ["", "", "history"]
    assert len(sample.episode.rows) == 2
    assert "one" not in decode(policy.asked[2].context_ids)


class BadCalls(PlainParser):
    """Takes each answer that begins with CALL as a call that cannot be read."""

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Answer:
        answer = await super().parse(token_ids, tools, finish_reason, taken, stop)
        if not answer.message["content"].startswith("CALL"):
            return answer
        return Answer(answer.message, (CallAttempt(CallStatus.BAD_JSON, 0, 1, error="a comma"),))


def test_calls_that_cannot_be_executed_are_told_and_then_end_the_episode() -> None:
    bad = BadCalls(decode)
    sample, policy = play(["CALL", "CALL", "go", "CALL", "go", "go"], parser=bad)
    assert sample.finish_reason == "done" and sample.episode is not None
    assert sample.episode.metrics["calls/bad_json"] == 3.0
    assert "Not executed: a comma" in decode(policy.asked[1].context_ids)
    sample, _ = play(["CALL"], parser=bad)
    assert sample.finish_reason == "parse_error" and sample.response_len > 0


PROGRAM = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": "go"}]
for _ in range(3):
    messages += [ask(messages), {"role": "user", "content": "on"}]
print(json.dumps({"reward": 0.25}))
"""


def test_a_program_that_reads_a_base_url_plays_an_episode() -> None:
    options = {"command": ["python3", "-c", PROGRAM]}
    sample, _ = play(["one", "two", "three"], kind="command", options=options)
    assert sample.finish_reason == EndReason.DONE, sample.episode
    assert sample.episode is not None and sample.episode.reward == 0.25
    assert len(sample.episode.rows) == 1 and len(sample.episode.turns) == 3


def test_an_error_of_the_engines_is_raised_whatever_the_program_makes_of_it() -> None:
    options = {"command": ["python3", "-c", PROGRAM]}
    with pytest.raises(RuntimeError, match="no engine serves"):
        play(["one"], kind="command", options=options, num_answers=1)


ASKS_TWICE = """
import threading, time
threading.Thread(target=ask, args=[[{"role": "user", "content": "at the same time"}]]).start()
time.sleep(0.3)
ask(messages)
sys.exit(1)
"""


@pytest.mark.parametrize(("max_requests", "reason"), [(1, "env_error"), (2, "tool_error")])
def test_a_program_that_fails_after_the_gateway_refused_it_tells_nothing_of_the_policy(
    max_requests: int, reason: str
) -> None:
    program = PROGRAM.partition("for _ in")[0] + ASKS_TWICE
    options = {"command": ["python3", "-c", program]}
    bounds: dict[str, Any] = {"answer_s": 2.0, "max_requests": max_requests}
    sample, _ = play(["one"], kind="command", options=options, **bounds)
    assert sample.finish_reason == reason and sample.episode is not None
    assert sample.episode.metrics["refused"] == (reason == "env_error")
