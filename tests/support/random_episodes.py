"""Drives episodes at random over real chat templates, and counts ids that came from a tokenizer."""

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.messages import (
    Answer,
    ChatRequest,
    EndReason,
    EpisodeEndedError,
    Message,
    Tool,
    keep_last_answers,
)
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder, SampleTurn, TurnRequest
from mcore_rl.agents.turn_tree import TurnTree
from mcore_rl.types import EpisodeRecord, Sample
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.conversations import TOOLS

WITHOUT_CALLS = ("mixtral",)
"""Families whose templates refuse the results of tools."""
KINDS = ("retry", "branch", "compaction", "rewritten", "sub_agent", *["continue"] * 5)
"""The kinds of requests, each as often as it is likely."""


class Encoded(int):
    """The id of a token that a tokenizer made of text; equal to the plain id."""


class MarkingTokenizer(PreTrainedTokenizerFast):
    """Marks each id that it makes."""

    def encode(self, *args: Any, **options: Any) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [Encoded(token) for token in super().encode(*args, **options)]


def marking_tokenizer(family: str) -> MarkingTokenizer:
    tokenizer = copy.copy(make_tokenizer(family))
    tokenizer.__class__ = MarkingTokenizer
    return tokenizer


class DrawnParser:
    """Draws from an answer's ids which parts of its text are reasoning, content and calls.

    A model with random weights never writes a call that SGLang's parsers would find.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Answer:
        digest = hashlib.blake2b(repr([*map(int, token_ids)]).encode(), digest_size=8)
        generator = random.Random(digest.digest())
        text = self._decode(list(token_ids))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if generator.random() < 0.3:
            cut = generator.randint(0, len(text))
            message |= {"reasoning_content": text[:cut] or "why", "content": text[cut:]}
        if tools and generator.random() < 0.6:
            calls = [
                _call(
                    f"call{len(taken) + i:05}",
                    generator.choice(tools),
                    text[: generator.randint(0, 9)],
                )
                for i in range(generator.randint(1, 3))
            ]
            message |= {"tool_calls": calls, "content": generator.choice(["", text])}
        return Answer(message)


def _call(call_id: str, tool: Tool, text: str) -> dict[str, Any]:
    arguments = json.dumps({"x": text})
    function = {"name": tool["function"]["name"], "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass
class RandomEpisode:
    """An episode in which whoever drives it does anything that the recorder allows.

    asked   each request, and the ids that answered it
    did     how often each kind of request was answered
    """

    family: str
    seed: int
    sample: SampleTurn
    limits: EpisodeLimits
    asked: list[tuple[TurnRequest, tuple[int, ...]]] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        tokenizer = marking_tokenizer(self.family)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        self._generator = random.Random(self.seed)
        # Apart, so that what is sampled does not change what is asked.
        self._kinds = random.Random(f"kinds {self.seed}")
        chat = ChatFormat(
            tokenizer, stop_ids(self.family), reasoning=self._reasoning(), template_options={}
        )
        self.recorder = EpisodeRecorder(chat, DrawnParser(decode), self._answer, self.limits)
        self._talks: list[tuple[list[Message], tuple[Tool, ...]]] = []
        """Conversations that end with an answer, and their tools."""
        self._requests: list[ChatRequest] = []

    async def play(self) -> EpisodeRecord:
        """Ask two to eight times, and end."""
        for number in range(self._kinds.randint(2, 8)):
            kind, request = self._request(number)
            try:
                completion = await self.recorder.complete(request)
            except EpisodeEndedError:
                break
            except ValueError:  # the template refuses it, before anything is sampled
                self.did["refused"] += 1
                continue
            self.did[kind] += 1
            self.did["calls"] += len(completion.answer.message.get("tool_calls") or ())
            self._requests.append(request)
            self._talks.append(([*request.messages, completion.answer.message], request.tools))
        return self.recorder.finish(EndReason.DONE)

    def _reasoning(self) -> Any:
        return self._generator.choice(["template", "keep"])

    async def _answer(self, request: TurnRequest) -> Sample:
        sample = await self.sample(request)
        self.asked.append((request, sample.response_ids))
        return sample

    def _request(self, number: int) -> tuple[str, ChatRequest]:
        """Return a request and its kind."""
        draw = self._generator
        kind = self._kinds.choice(KINDS) if self._talks else "start"
        if kind == "retry":
            return kind, draw.choice(self._requests)
        if kind in ("start", "sub_agent"):
            messages = [{"role": "user", "content": f"{kind} {number} {draw.random()}"}]
            if self.family not in WITHOUT_CALLS and draw.random() < 0.5:
                messages.insert(0, {"role": "system", "content": f"You are agent {number}."})
            return kind, ChatRequest(tuple(messages), self._tools())
        talk, tools = draw.choice(self._talks) if kind == "branch" else self._talks[-1]
        messages = [*talk, *self._told(talk[-1], number)]
        if kind == "compaction":
            messages = keep_last_answers(messages, number=1)
        elif kind == "rewritten":
            at = draw.randrange(len(talk))
            messages[at] = {**messages[at], "content": f"a summary {number}"}
        return kind, ChatRequest(tuple(messages), tools)

    def _tools(self) -> tuple[Tool, ...]:
        if self.family in WITHOUT_CALLS or self._generator.random() < 0.2:
            return ()
        return tuple(TOOLS[: self._generator.randint(1, 2)])

    def _told(self, answer: Message, number: int) -> list[Message]:
        """Return what follows an answer: results of all its calls, or a question, or both."""
        told: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number} of {i}"}
            for i, call in enumerate(answer.get("tool_calls") or ())
        ]
        if not told or self._generator.random() < 0.2:
            told.append({"role": "user", "content": f"more {number} é\n"})
        return told


def check_rows(
    episode: EpisodeRecord, asked: Sequence[tuple[TurnRequest, tuple[int, ...]]]
) -> None:
    """Check that each answer is trained once, behind exactly what the engine was given for it."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for row in episode.rows:
        ids, turn_T = row.token_ids.tolist(), row.turn_T.tolist()
        for turn in sorted(set(turn_T) - {-1}):
            start, num = turn_T.index(turn), turn_T.count(turn)
            assert turn_T[start : start + num] == [turn] * num
            seen.append((tuple(ids[:start]), tuple(ids[start : start + num])))
    assert sorted(seen) == sorted((request.context_ids, answer) for request, answer in asked)


def num_reencoded(
    tree: TurnTree, asked: Sequence[tuple[TurnRequest, tuple[int, ...]]]
) -> tuple[int, int]:
    """Return how many ids in the places of answers, and of other tokens, a tokenizer made.

    The places are those of the turns and of all that the engine was given for them.
    """
    given = {request.turn: request.context_ids for request, _ in asked}
    in_answers = 0
    elsewhere = 0
    for turn in tree.turns:
        in_answers += _num_marked(turn.token_ids)
        end = 0
        for earlier in tree.path(turn.number):
            start = end + len(earlier.context_ids)
            elsewhere += _num_marked(given[turn.number][end:start])
            end = start
            if earlier is not turn:
                end += len(earlier.token_ids)
                in_answers += _num_marked(given[turn.number][start:end])
    return in_answers, elsewhere


def _num_marked(ids: Sequence[int]) -> int:
    return sum(isinstance(token, Encoded) for token in ids)
