"""Exactly the tokens that an engine was given and sampled train, whoever drives the episode."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcore_rl.agents.chat.answer_parser import AnswerParser
from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.messages import (
    ChatRequest,
    Completion,
    ConversationError,
    EndReason,
    EpisodeEndedError,
    Message,
)
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder, SampleTurn, TurnRequest
from mcore_rl.agents.turn_tree import Fork
from mcore_rl.types import Sample
from tests.support.chat_templates import FAMILIES, make_tokenizer, stop_ids
from tests.support.stand_in_policy import PlainParser, StandInPolicy

LIMITS = EpisodeLimits(max_turns=100, max_turn_len=50, max_tokens=100_000)
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Scene:
    """A recorder over a family's real template, and a policy that says what a test wants."""

    def __init__(self, family: str, texts: list[str], limits: EpisodeLimits = LIMITS) -> None:
        tokenizer: Any = make_tokenizer(family)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=True)

        self.policy = StandInPolicy(texts, encode, stop_ids(family)[0])
        chat = ChatFormat(tokenizer, stop_ids(family), reasoning="template", template_options={})
        self.recorder = EpisodeRecorder(chat, PlainParser(decode), self.policy, limits)

    def ask(self, *messages: Message, **options: Any) -> Completion:
        return asyncio.run(self.recorder.complete(ChatRequest(messages, **options)))

    def check_rows(self) -> None:
        """Each answer is trained once, behind exactly what the engine was given for it."""
        episode = self.recorder.finish(EndReason.DONE)
        seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for row in episode.rows:
            ids = row.token_ids.tolist()
            for turn in sorted(set(row.turn_T[row.is_trained].tolist())):
                places = [t for t, of in enumerate(row.turn_T.tolist()) if of == turn]
                assert places == list(range(places[0], places[-1] + 1))
                seen.append((tuple(ids[: places[0]]), tuple(ids[t] for t in places)))
        asked = [request.context_ids for request in self.policy.asked]
        assert sorted(seen) == sorted(zip(asked, self.policy.answers, strict=True))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@few
@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10**6))
def test_any_driver_trains_what_was_sampled(family: str, seed: int) -> None:
    """It continues, retries, branches, rewrites history and begins other conversations."""
    generator = random.Random(seed)
    texts = [f"answer {generator.random()} \n{{'é'" for _ in range(12)]
    scene = Scene(family, texts, EpisodeLimits(100, generator.choice([4, 50]), 100_000))
    conversations: list[list[Message]] = []
    for number in range(generator.randint(1, 12)):
        kind = generator.random() if conversations else 1.0
        if kind > 0.85:
            messages = [user(f"task {number}")]
        else:
            messages = list(generator.choice(conversations))
            if kind < 0.15:
                messages = [messages[0], *messages[-2:]]
            if kind < 0.6:
                messages.append(user(f"more {number}"))
            elif messages[-1]["role"] == "assistant":
                messages.pop()
        if messages[-1]["role"] == "assistant" or not _alternates(messages):
            messages = [user(f"other {number}")]
        completion = scene.ask(*messages)
        conversations.append([*messages, completion.answer.message])
    scene.check_rows()


def _alternates(messages: list[Message]) -> bool:
    """Some templates take nothing else."""
    roles = [message["role"] for message in messages]
    return roles == [("user", "assistant")[i % 2] for i in range(len(roles))]


def test_turns_of_one_conversation_are_one_row() -> None:
    scene = Scene("qwen3", ["one", "two", "three"])
    messages = [user("go")]
    for more in ("on", "and on", ""):
        completion = scene.ask(*messages)
        messages += [completion.answer.message, user(more)]
    turns = scene.recorder.tree.turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, ""), (0, ""), (1, "")]
    assert [request.experts_start for request in scene.policy.asked[:1]] == [0]
    ends = [len(scene.recorder.tree.path_ids(turn.number)) for turn in turns]
    assert [request.experts_start for request in scene.policy.asked[1:]] == [
        end - 1 for end in ends[:-1]
    ]
    assert len(scene.recorder.finish(EndReason.DONE).rows) == 1


def test_forks_have_reasons() -> None:
    scene = Scene("qwen3", ["one", "two", "three", "four", "five", "six"])
    first = scene.ask(user("go")).answer.message
    scene.ask(user("go"), first, user("on"))
    scene.ask(user("go"), first, user("on"))
    scene.ask(user("go"), first, user("elsewhere"))
    scene.ask(user("go"), {"role": "assistant", "content": "a summary"}, user("on"))
    scene.ask(user("help me"))
    scene.ask(user("help me"))
    forks = [(turn.parent, turn.fork) for turn in scene.recorder.tree.turns]
    assert forks == [
        (None, Fork.NONE),
        (0, Fork.NONE),
        (0, Fork.RETRY),
        (0, Fork.BRANCH),
        (None, Fork.HISTORY),
        (None, Fork.SUB_AGENT),
        (None, Fork.RETRY),
    ]


def test_answers_are_not_continued() -> None:
    scene = Scene("qwen3", ["one"])
    answer = scene.ask(user("go")).answer.message
    for messages in ((), (user("go"), answer)):
        with pytest.raises(ConversationError, match="nothing asks for more"):
            scene.ask(*messages)


def test_other_tools_are_another_conversation() -> None:
    scene = Scene("qwen3", ["one", "two"])
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    answer = scene.ask(user("go")).answer.message
    scene.ask(user("go"), answer, user("on"), tools=(tool,))
    assert scene.recorder.tree.turns[1].parent is None


def test_another_adapter_answers_in_rows_of_its_own_that_do_not_train() -> None:
    scene = Scene("qwen3", ["one", "two", "three", "four"])
    first = scene.ask(user("go")).answer.message
    judged = scene.ask(user("go"), first, user("is it right?"), adapter="base").answer.message
    scene.ask(user("go"), first, user("is it right?"), judged, user("sure?"), adapter="base")
    scene.ask(user("go"), first, user(str(judged["content"])))
    turns = scene.recorder.tree.turns
    places = [(turn.parent, turn.adapter) for turn in turns]
    assert places == [(None, ""), (None, "base"), (1, "base"), (0, "")]
    assert [request.adapter for request in scene.policy.asked] == ["", "base", "base", ""]
    asked, versions = scene.policy.asked, [turn.versions for turn in turns]
    assert asked[1].experts_start == 0 < asked[3].experts_start and all(versions)
    episode = scene.recorder.finish(EndReason.DONE)
    (row,) = episode.rows
    assert set(row.turn_T[row.is_trained].tolist()) == {0, 3}
    told = [(turn.adapter, turn.versions) for turn in episode.turns]
    assert told == [("", (1,)), ("base", (2,)), ("base", (3,)), ("", (4,))]


def test_limits_end_the_episode() -> None:
    scene = Scene("qwen3", ["a long answer of several tokens"], EpisodeLimits(2, 3, 40))
    first = scene.ask(user("go"))
    assert len(first.token_ids) == 3 and first.finish_reason == "length"
    scene.ask(user("go"), first.answer.message, user("on"), max_tokens=1)
    assert len(scene.policy.answers[1]) == 1
    with pytest.raises(EpisodeEndedError) as ended:
        scene.ask(user("go"))
    assert ended.value.reason is EndReason.MAX_TURNS
    short = Scene("qwen3", ["x"], EpisodeLimits(9, 9, 3))
    with pytest.raises(EpisodeEndedError) as ended:
        short.ask(user("go"))
    assert ended.value.reason is EndReason.MAX_TOKENS
    assert not short.policy.asked


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_without_its_stop_text_is_continued_after_all_its_tokens(family: str) -> None:
    said = "Look outside.\nObservation: sun"
    scene = Scene(family, [said, "Bye."])
    chosen: Any = make_tokenizer(family)
    scene.recorder.parser = AnswerParser(
        chosen, stop_ids(family), refuse_to_parse, tool_parser=None, reasoning_parser=None
    )
    first = scene.ask(user("go"), stop=("\nObservation:",))
    assert first.answer.message["content"] == "Look outside." and first.finish_reason == "stop"
    sampled = tuple(chosen.encode(said, add_special_tokens=False))
    assert first.token_ids == scene.policy.answers[0] == sampled
    scene.ask(user("go"), first.answer.message, user("sun"), stop=("\nObservation:",))
    turns = scene.recorder.tree.turns
    assert [(turn.parent, turn.fork) for turn in turns] == [(None, Fork.NONE), (0, Fork.NONE)]
    asked = scene.policy.asked[1].context_ids
    assert asked[: len(first.prompt_ids) + len(sampled)] == first.prompt_ids + sampled
    scene.check_rows()


async def refuse_to_parse(path: str, body: Any) -> Any:
    raise AssertionError(f"no parser is to be asked: {path} {body}")


def test_requests_without_an_answer_are_no_turns() -> None:
    scene = Scene("qwen3", ["one", "two"], EpisodeLimits(2, 50, 1000))
    recorder, seeds = scene.recorder, []

    async def fail(*asked: Any) -> Any:
        if isinstance(asked[0], TurnRequest):
            seeds.append(asked[0].turn)
        raise RuntimeError("an engine died")

    scene.ask(user("go"))
    for part, whole in (("sample", scene.policy), ("parser", recorder.parser)):
        setattr(recorder, part, fail if part == "sample" else SimpleNamespace(parse=fail))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="an engine died"):
                scene.ask(user("go"))
        setattr(recorder, part, whole)
    scene.ask(user("go on"))
    assert [turn.number for turn in recorder.tree.turns] == [0, 1]
    seeds += [request.turn for request in scene.policy.asked]
    assert sorted(seeds) == list(range(8))
    with pytest.raises(EpisodeEndedError, match="max_turns: 2 answers"):
        scene.ask(user("and on"))


def test_answers_under_way_count_as_turns() -> None:
    scene = Scene("qwen3", ["one"], EpisodeLimits(2, 50, 1000))

    async def ask_at_once() -> list[Any]:
        asked = (scene.recorder.complete(ChatRequest((user("go"),))) for _ in range(3))
        return await asyncio.gather(*asked, return_exceptions=True)

    scene.recorder.sample = wait_a_moment(scene.policy)
    ended = asyncio.run(ask_at_once())[2]
    assert isinstance(ended, EpisodeEndedError) and ended.reason is EndReason.MAX_TURNS


def wait_a_moment(sample: SampleTurn) -> SampleTurn:
    """Let other requests come before the answer."""

    async def sample_later(request: TurnRequest) -> Sample:
        await asyncio.sleep(0)
        return await sample(request)

    return sample_later


def test_rewards_are_of_turns_and_of_the_episode() -> None:
    scene = Scene("qwen3", ["one"])
    completion = scene.ask(user("go"))
    scene.recorder.add_reward(0.5, completion.turn)
    scene.recorder.add_reward(2.0)
    with pytest.raises(ValueError, match="turn 1: the episode has 1 turns"):
        scene.recorder.add_reward(1.0, 1)
    episode = scene.recorder.finish(EndReason.DONE)
    assert episode.reward == 2.5 and episode.turns[0].reward == 0.5
    with pytest.raises(EpisodeEndedError):
        scene.recorder.add_reward(1.0)
    with pytest.raises(EpisodeEndedError):
        scene.ask(user("go"))
