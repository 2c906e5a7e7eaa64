"""From the token ids of a response to a message of the assistant and its tool calls.

token ids -> text, with the place of each token in it -> reasoning | rest -> texts of calls
          -> SGLang's parser -> calls or errors
"""

import asyncio
import re
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.chat.template import TRIAL_TOOL
from mcore_rl.agents.chat.tool_syntax import (
    SYNTAXES,
    CallIds,
    Written,
    describe_arguments_error,
    describe_unknown_tool,
    explain,
    find_written,
    is_malformed,
)
from mcore_rl.agents.messages import Answer, CallAttempt, CallStatus, Tool

BROKEN = "\ufffd"
"""Decoding puts it where bytes are no whole character."""


Ask = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Posts a body to a path of an engine and returns what it answers.

It raises ValueError if the engine answers with an error: SGLang's parsers fail on some texts.
"""
THINK = "<think>"
HARMONY = "gpt-oss"
"""Parser of responses that are sequences of messages in channels."""
HARMONY_TOKENS = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of the tokens, special tokens included, blanks as they are."""
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def find_token_starts(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str
) -> list[int]:
    """Return the offset in `text` at which each token begins; `text` is what the tokens decode to.

    Tokens that share a character begin where it begins.
    """
    starts, pieces = _starts_by_piece(tokenizer, token_ids)
    if "".join(pieces) == text:
        return starts
    return _starts_in_context(tokenizer, token_ids)


def find_token_span(starts: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return the range of tokens that hold the characters [start, stop)."""
    first = bisect_right(starts, start) - 1
    return bisect_left(starts, starts[first]), bisect_left(starts, stop)


def _starts_by_piece(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]
) -> tuple[list[int], list[str]]:
    """Decode token by token, tokens with parts of a character together."""
    known: dict[int, str] = {}
    starts: list[int] = []
    pieces: list[str] = []
    broken: list[int] = []
    length = 0
    for token_id in token_ids:
        if token_id not in known:
            known[token_id] = decode(tokenizer, [token_id])
        piece = known[token_id]
        if broken and BROKEN not in piece:
            pieces.append(decode(tokenizer, broken))
            length += len(pieces[-1])
            broken = []
        starts.append(length)
        if BROKEN in piece:
            broken.append(token_id)
        else:
            pieces.append(piece)
            length += len(piece)
    if broken:
        pieces.append(decode(tokenizer, broken))
    return starts, pieces


def _starts_in_context(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[int]:
    """Decode each token after the one before it: SentencePiece drops the blank of the first."""
    starts: list[int] = []
    length = 0
    window = 0
    read = 0
    for index in range(len(token_ids)):
        starts.append(length)
        piece = decode(tokenizer, token_ids[window : index + 1])
        if not piece.endswith(BROKEN):
            length += len(piece) - len(decode(tokenizer, token_ids[window:read]))
            window = read
            read = index + 1
    return starts


@dataclass(frozen=True)
class Parsed:
    """The attempts that one text is, and the calls that the message gets from it."""

    written: Written
    attempts: tuple[CallAttempt, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()


class AnswerParser:
    """Parses responses with the parsers of SGLang's engines, over their HTTP endpoints."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Collection[int],
        ask: Ask,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        """`tool_parser`, `reasoning_parser`: SGLang's names; None: responses have no such part.

        new_id   makes the id of a call, unique in an episode
        """
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ask = ask
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._syntax = SYNTAXES.get(tool_parser or "")
        self._new_id = new_id

    async def check(self) -> None:
        """Ask each parser about a word; ValueError if the engine does not know it.

        A run calls it before the first episode: later, a parser that fails on a text means no call.
        """
        bodies: list[tuple[str, dict[str, Any]]] = []
        if self._reasoning_parser:
            body = {"text": "Hi", "reasoning_parser": self._reasoning_parser}
            bodies.append(("/separate_reasoning", body))
        if self._tool_parser:
            bodies.append(("/parse_function_call", self._body("Hi", [TRIAL_TOOL])))
        for path, body in bodies:
            parser = body.get("reasoning_parser") or self._tool_parser
            try:
                await self._ask(path, body)
            except ValueError as error:
                raise ValueError(
                    f"the engine's {path} fails with the parser {parser}: {error}; name one that"
                    " this version of SGLang has"
                ) from error

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Collection[str] = (),
        stop: Sequence[str] = (),
    ) -> Answer:
        """Return the response as a message, and each call that it wrote or tried to write.

        The message ends before the first of the texts `stop`, as APIs have it; engines sample the
        tokens of that text, and may sample more. An end of a call among these texts is kept.

        The content is the text outside of reasoning and calls; calls that failed stay in it, so
        that the policy sees them if the conversation is rendered again. gpt-oss's content and
        reasoning lose the tokens of channels, which its template refuses.

        finish_reason   why sampling ended: a call that "length" cut off is never executed
        taken           ids of earlier calls in the episode, for Kimi, whose responses name ids
        """
        text = self._text(token_ids)
        stop_text = ""
        if finish_reason == "stop":
            text, stop_text = self._cut(text, stop, keep_end=bool(tools))
        reasoning, rest = await self._separate(text)
        begin = 0 if rest == text or self._tool_parser == HARMONY else _begin_of_rest(text, rest)
        content = rest.lstrip("\n") if begin else rest
        parsed: list[Parsed] = []
        if tools and self._tool_parser:
            parsed, content = await self._calls(text, rest, begin, tools, finish_reason, taken)
        if HARMONY in (self._tool_parser, self._reasoning_parser):
            content = HARMONY_TOKENS.sub("", content)
            reasoning = HARMONY_TOKENS.sub("", reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        calls = [call for one in parsed for call in one.calls]
        if calls:
            message["tool_calls"] = calls
        return Answer(message, self._attempts(token_ids, text, parsed), stop_text)

    async def _separate(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the text after it."""
        if not self._reasoning_parser:
            return "", text
        body = {"text": text, "reasoning_parser": self._reasoning_parser}
        answer = await self._ask("/separate_reasoning", body)
        reasoning = str(answer.get("reasoning_text") or "")
        if reasoning.lstrip().startswith(THINK):  # SGLang leaves it after blanks, as GLM writes it
            reasoning = reasoning.lstrip().removeprefix(THINK)
        return reasoning, str(answer.get("text") or "")

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text without the stop token, unless that token ends a call."""
        if token_ids and token_ids[-1] in self._stop_token_ids:
            last = decode(self._tokenizer, token_ids[-1:])
            if self._syntax is None or last != self._syntax.end:
                token_ids = token_ids[:-1]
        return decode(self._tokenizer, token_ids)

    def _cut(self, text: str, stop: Sequence[str], keep_end: bool) -> tuple[str, str]:
        """Return the text before the first of the texts `stop`, and which it is; empty: none.

        keep_end   whether a stop text that is the end of a call stays, so that the call is whole
        """
        places = [(text.find(one), len(one), one) for one in stop]
        begin, length, found = min(
            (place for place in places if place[0] >= 0), default=(len(text), 0, "")
        )
        is_end = self._syntax is not None and found and found.strip() == self._syntax.end
        return text[: begin + length if keep_end and is_end else begin], found

    async def _calls(
        self,
        text: str,
        rest: str,
        begin: int,
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Collection[str],
    ) -> tuple[list[Parsed], str]:
        """Return what became of each call in `text`, and the content of the message.

        `rest` is the text after the reasoning, which ends at `begin`.
        """
        ids = CallIds(self._tool_parser or "", self._new_id, taken)
        if self._syntax is None:
            return await self._calls_at_once(rest, begin, len(text), tools, ids)
        inside = [
            self._find_in_reasoning(written) for written in find_written(self._syntax, text[:begin])
        ]
        found = find_written(self._syntax, text, begin)
        cut_off = finish_reason == "length"
        if cut_off and not self._syntax.end:
            found = [replace(one, closed=False) for one in found]
        answers = await asyncio.gather(*(self._ask_about(one, tools, cut_off) for one in found))
        names = [tool["function"]["name"] for tool in tools]
        outside = [
            self._judge(one, calls, names, ids) for one, calls in zip(found, answers, strict=True)
        ]
        if self._tool_parser == HARMONY:
            content = await self._harmony_content(rest, tools)
        else:
            content = self._content(text, begin, outside)
        return [*inside, *outside], content

    async def _calls_at_once(
        self, rest: str, begin: int, stop: int, tools: Sequence[Tool], ids: CallIds
    ) -> tuple[list[Parsed], str]:
        """Ask about the whole text, in a format whose calls this code cannot find."""
        answer = await self._ask("/parse_function_call", self._body(rest, tools))
        written = Written(begin, stop, rest, closed=True)
        names = [tool["function"]["name"] for tool in tools]
        calls = answer.get("calls") or []
        parsed = [self._judge(written, calls, names, ids)] if calls else []
        return parsed, str(answer.get("normal_text") or "")

    async def _ask_about(
        self, written: Written, tools: Sequence[Tool], cut_off: bool
    ) -> Sequence[Mapping[str, Any]]:
        """Return the calls that SGLang's parser sees in the text of one call."""
        assert self._syntax is not None
        unfinished = cut_off and self._syntax.end and not written.closed
        if unfinished or is_malformed(self._syntax, written):
            return ()
        text = self._syntax.before + written.text + self._syntax.after
        try:
            answer = await self._ask("/parse_function_call", self._body(text, tools))
        except ValueError:  # SGLang's parsers fail on some texts
            return ()
        return answer.get("calls") or ()

    def _body(self, text: str, tools: Sequence[Tool]) -> dict[str, Any]:
        return {"text": text, "tools": list(tools), "tool_call_parser": self._tool_parser}

    def _judge(
        self,
        written: Written,
        calls: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        ids: CallIds,
    ) -> Parsed:
        """Return the attempts and calls of one text, given what SGLang's parser saw in it."""
        if not calls:
            assert self._syntax is not None
            status, name, error = explain(self._syntax, written, names)
            return Parsed(written, (CallAttempt(status, 0, 0, name, error=error),))
        attempts = []
        good = []
        for call in calls:
            name = call.get("name") or ""
            arguments = call.get("parameters") or "{}"
            if name not in names:
                error = describe_unknown_tool(name, names)
                attempts.append(CallAttempt(CallStatus.UNKNOWN_TOOL, 0, 0, name, error=error))
            elif error := describe_arguments_error(arguments):
                attempts.append(CallAttempt(CallStatus.BAD_JSON, 0, 0, name, error=error))
            else:
                call_id = ids.make(name, written.text)
                attempts.append(CallAttempt(CallStatus.OK, 0, 0, name, call_id))
                function = {"name": name, "arguments": arguments}
                good.append({"id": call_id, "type": "function", "function": function})
        return Parsed(written, tuple(attempts), tuple(good))

    def _find_in_reasoning(self, written: Written) -> Parsed:
        error = "The tool call is part of the reasoning; calls follow after it."
        return Parsed(written, (CallAttempt(CallStatus.IN_REASONING, 0, 0, error=error),))

    def _content(self, text: str, begin: int, outside: Sequence[Parsed]) -> str:
        """Return the text after `begin` without the calls that are executed."""
        assert self._syntax is not None
        kept = []
        position = begin
        executed = [one.written for one in outside if one.calls]
        for written in executed:
            kept.append(text[position : written.start])
            position = written.stop
        content = "".join([*kept, text[position:]])
        if not executed:
            return content.lstrip("\n") if begin else content
        for marker in (self._syntax.before, self._syntax.after):
            content = content.replace(marker, "") if marker else content
        return content.strip()

    async def _harmony_content(self, rest: str, tools: Sequence[Tool]) -> str:
        answer = await self._ask("/parse_function_call", self._body(rest, tools))
        return str(answer.get("normal_text") or "")

    def _attempts(
        self, token_ids: Sequence[int], text: str, parsed: Sequence[Parsed]
    ) -> tuple[CallAttempt, ...]:
        """Return all attempts with their tokens."""
        if not any(one.attempts for one in parsed):
            return ()
        starts = find_token_starts(self._tokenizer, token_ids, decode(self._tokenizer, token_ids))
        placed = []
        for one in parsed:
            start, stop = find_token_span(starts, one.written.start, one.written.stop)
            placed += [replace(attempt, start=start, stop=stop) for attempt in one.attempts]
        return tuple(placed)


def _begin_of_rest(text: str, rest: str) -> int:
    """Return where the text after the reasoning begins."""
    if text.endswith(rest):
        return len(text) - len(rest)
    return max(text.rfind(rest.strip()), 0)
