"""Defines what environments, programs and the recorder exchange, in OpenAI's chat format.

The recorder compares conversations in the normal form of their messages, and shortens them before
the policy answers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

Message = Mapping[str, Any]
"""role, content; of an assistant also reasoning_content and tool_calls; of a tool tool_call_id.

The arguments of a tool call are a string of JSON, as OpenAI has them.
"""
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}."""


class CallStatus(StrEnum):
    """The fate of the text of a tool call. Only calls that are OK are executed."""

    OK = "ok"
    BAD_JSON = "bad_json"
    UNCLOSED = "unclosed"
    UNKNOWN_TOOL = "unknown_tool"
    IN_REASONING = "in_reasoning"


@dataclass(frozen=True)
class CallAttempt:
    """A tool call that a response wrote, or tried to write.

    start, stop   its tokens in the response
    call_id       id of the tool call in the answer's message; empty unless the status is OK
    error         why it is not OK, in words for the policy
    """

    status: CallStatus
    start: int
    stop: int
    name: str = ""
    call_id: str = ""
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """A response as a message of the assistant, and what it tried to call.

    stop_text   text of the request's `stop` that ended the response; the message ends before it
    """

    message: Message
    attempts: tuple[CallAttempt, ...] = ()
    stop_text: str = ""


@dataclass(frozen=True)
class ChatRequest:
    """Asks the policy for its next message.

    max_tokens   bound of the response, besides those of the recipe; None: no other
    stop         texts that end the response; its tokens go through them, its message does not
    adapter      what answers in the place of the policy, by the name that engines know; empty: the
                 policy itself
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    adapter: str = ""


@dataclass(frozen=True)
class Completion:
    """The policy's next message, with the tokens that it was sampled as.

    turn            number of the turn in its episode
    prompt_ids      every token that the engine was given
    logprobs        one per token of token_ids
    finish_reason   stop, length, tool_calls
    """

    turn: int
    answer: Answer
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class EndReason(StrEnum):
    """Why an episode is over; every episode has exactly one."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    DEADLINE = "deadline"
    ENV_ERROR = "env_error"
    TOOL_ERROR = "tool_error"
    PARSE_ERROR = "parse_error"
    DROPPED_STALE = "dropped_stale"
    ABORTED = "aborted"


class ConversationError(ValueError):
    """No answer can follow these messages; the text says why, for whoever wrote them."""


class EpisodeEndedError(Exception):
    """The policy says nothing more in this episode; `reason` is why it is over."""

    def __init__(self, reason: EndReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


@dataclass(frozen=True)
class EpisodeTask:
    """An environment is reset to this: a prompt of the data set and one of its samples.

    seed   differs between the samples of a run, and is the same when an episode begins again
    """

    messages: tuple[Message, ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    sample_index: int = 0
    seed: int = 0


def make_fingerprints(
    messages: Sequence[Message], tools: Sequence[Tool], adapter: str = ""
) -> list[bytes]:
    """Return a hash of the first 0, 1, 2, ... messages, equal for those that differ in form alone.

    Conversations of different adapters are different. Reasoning is left out: clients may drop that
    of earlier answers, and it stays what it was.
    """
    hashes = [_hash(b"", [*tools, adapter] if adapter else list(tools))]
    for message in messages:
        hashes.append(add_message(hashes[-1], message))
    return hashes


def add_message(before: bytes, message: Message) -> bytes:
    """Return the hash of a conversation whose hash was `before`, with one more message."""
    return _hash(before, normalize(message))


def _hash(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(_json(value), digest_size=16, key=before).digest()


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # numbers beyond 64 bits, halves of surrogate pairs
        return json.dumps(value, sort_keys=True).encode()


def normalize(message: Message) -> dict[str, Any]:
    """Return what counts of a message: role, text, tool calls and the call that it answers."""
    form: dict[str, Any] = {"role": message.get("role"), "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        form["tool_calls"] = [
            {"id": call.get("id"), **_function(call.get("function") or {})} for call in calls
        ]
    if message.get("tool_call_id"):
        form["tool_call_id"] = message["tool_call_id"]
    return form


def _text(content: Any) -> Any:
    """Return parts of text joined; None and no parts are the empty text."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if part.get("type") in (None, "text")]
        return "".join(map(str, texts)) if len(texts) == len(content) else content
    return content or ""


def _function(function: Any) -> dict[str, Any]:
    arguments = function.get("arguments")
    return {
        "name": function.get("name"),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }


def keep_last_answers(messages: Sequence[Message], number: int) -> list[Message]:
    """Return the first messages, up to the first answer, and what follows the last answers.

    With number=1 and  system, task, answer 1, result 1, answer 2, result 2  these are
    system, task, answer 2, result 2. With number=0 they are  system, result 2.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(answers) <= number:
        return list(messages)
    if not number:
        system = [message for message in messages if message.get("role") == "system"]
        return [*system, *messages[answers[-1] + 1 :]]
    return [*messages[: answers[0]], *messages[answers[-number] :]]
