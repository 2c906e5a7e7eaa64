"""Holds values, errors and readers that the translations of all APIs share.

Call, Answer, Memory   a client's call, its answer, and what is remembered for the next call
ApiError               an error in the words of an API, with the status that makes SDKs retry or not
read_required ...      read a field of a body; what is missing, malformed or unsupported is named
make_event             writes a server-sent event
                       (https://html.spec.whatwg.org/multipage/server-sent-events.html)
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import orjson

from mcore_rl.agents.messages import ChatRequest, Completion, EpisodeEndedError, Message
from mcore_rl.types.samples import MOST_STOP_LEN, MOST_STOPS

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


T = TypeVar("T")
Body = Mapping[str, Any]
_NAMES = {str: "a string", int: "an integer", bool: "a boolean", dict: "an object", list: "a list"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 32
"""Names of ignored parameters that an answer lists."""
COMMENT = b": the policy generates\n\n"
DONE = b"data: [DONE]\n\n"
DecodeToken = Callable[[int], str]
"""Returns the text of one token."""


class ApiError(Exception):
    """An error that the client is told about.

    code    for programs, such as unsupported_parameter
    param   the field of the request that is to blame, if one is
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}


class BadRequestError(ValueError):
    """A request that is malformed, or asks for something the gateway does not do."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(f"{param}: {message}")
        self.error = ApiError(400, code, f"{param}: {message}", param)


def refuse_unsupported(param: str, remedy: str) -> BadRequestError:
    """Return the refusal of a field that this gateway does not support."""
    return BadRequestError(
        param, f"the gateway does not support it; {remedy}", "unsupported_parameter"
    )


def make_episode_over(ended: EpisodeEndedError) -> ApiError:
    """Return the error for a request to an episode that is over.

    Its status is 400, because no SDK and no agent sends such a request again.
    """
    return ApiError(400, "episode_over", f"the episode is over: {ended}")


def make_overloaded(retry_after_s: float) -> ApiError:
    """Return a 429 that tells the client when to ask again, in whole seconds and milliseconds."""
    headers = {
        "Retry-After": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(1000 * retry_after_s))),
    }
    message = f"the policy's engines are busy; ask again in {retry_after_s:g} s"
    return ApiError(429, "overloaded", message, headers=headers)


def make_openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of OpenAI's APIs."""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _OPENAI_TYPES.get(error.status, fallback),
            "param": error.param,
            "code": error.code,
        }
    }


def make_anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of Anthropic's API, with the code in addition."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, "code": error.code},
    }


def read_optional(body: Body, name: str, kind: type[T], where: str = "") -> T | None:
    """Return a field, or None if it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequestError(where + name, f"must be {_NAMES[kind]}, not {_short(value)}")
    return value


def read_required(body: Body, name: str, kind: type[T], where: str = "") -> T:
    """Return a field that must be there."""
    value = read_optional(body, name, kind, where)
    if value is None:
        raise BadRequestError(where + name, "is missing", "missing_required_parameter")
    return value


def read_objects(values: Sequence[Any] | None, where: str) -> Iterable[tuple[str, Body]]:
    """Yield the place and the value of each entry of a list of objects."""
    for number, value in enumerate(values or ()):
        place = f"{where}[{number}]"
        if not isinstance(value, dict):
            raise BadRequestError(place, f"must be an object, not {_short(value)}")
        yield place, value


def read_max_tokens(body: Body, *names: str) -> int | None:
    """Return the bound that the first of these fields sets; it must be positive."""
    for name in names:
        value = read_optional(body, name, int)
        if value is not None:
            if value < 1:
                raise BadRequestError(name, f"must be at least 1, not {value}")
            return value
    return None


def stop_texts(body: Body, name: str) -> tuple[str, ...]:
    """Return the texts that end the response: one, a list, or none."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(name, "must be a text or a list of texts, none of them empty")
    if len(texts) > MOST_STOPS:
        raise BadRequestError(name, f"has {len(texts)} texts, at most {MOST_STOPS}")
    longest = max(map(len, texts), default=0)
    if longest > MOST_STOP_LEN:
        raise BadRequestError(name, f"has a text of {longest} characters, at most {MOST_STOP_LEN}")
    return tuple(texts)


def refuse(body: Body, remedies: Mapping[str, str]) -> None:
    """Raise BadRequestError if one of these fields is set, unless to null, false, 0 or empty."""
    for name, remedy in remedies.items():
        if body.get(name):
            raise refuse_unsupported(name, remedy)


def list_ignored_names(body: Body, known: frozenset[str]) -> tuple[str, ...]:
    """Return the names, sorted, of the fields that are set and not `known`: those without effect.

    Names that do not look like one are left out, so that they fit into a header.
    """
    found = [
        name
        for name, value in body.items()
        if value is not None and name not in known and _PLAIN_NAME.fullmatch(name)
    ]
    return tuple(sorted(found)[:_MOST_NAMES])


def join_text(content: Any, where: str, kinds: frozenset[str]) -> str:
    """Return the text of a message: a string, null, or parts of text, which are joined.

    kinds: the types of parts that hold text; others, such as images, are refused by name.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(where, f"must be a string or a list of parts, not {_short(content)}")
    return "".join(
        read_part_text(part, place, kinds) for place, part in read_objects(content, where)
    )


def read_part_text(part: Body, place: str, kinds: frozenset[str]) -> str:
    """Return the text of a part of a message, which must be of one of these kinds."""
    kind = read_required(part, "type", str, f"{place}.")
    if kind not in kinds:
        raise refuse_unsupported(f"{place}.type={kind[:64]}", "the policy reads text only")
    return read_required(part, "text", str, f"{place}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def make_event(data: Any, name: str = "") -> bytes:
    """Return an event with `data` as JSON, which has no line breaks."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass(frozen=True)
class Call:
    """A request of a client, in the terms of an episode.

    ignored   names of the parameters that have no effect
    options   what the answer's form depends on; each API has its own
    """

    request: ChatRequest
    model: str
    is_streamed: bool = False
    ignored: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answered:
    """A completion and what identifies the answer; a retry is given the same.

    id          random, of letters and digits
    created_s   Unix time at which the request came
    """

    id: str
    created_s: int
    completion: Completion


@dataclass
class Memory:
    """Keeps for a session whatever its clients do not send back.

    arguments   by the id of a tool call: the text that the policy wrote
    responses   by the id of a response: the conversation up to it, without instructions
    """

    arguments: dict[str, str] = field(default_factory=dict)
    responses: dict[str, tuple[Message, ...]] = field(default_factory=dict)


class Api(Protocol):
    """Translates one API; all methods are pure but `remember`."""

    keep_alive: bytes
    """Sent on a stream while the policy generates."""

    def read(self, body: Body, memory: Memory) -> Call:
        """Return the call of a request's body; raises BadRequestError."""
        ...

    def answer(self, call: Call, answered: Answered) -> dict[str, Any]:
        """Return the body of the answer."""
        ...

    def events(self, call: Call, answered: Answered) -> Iterator[bytes]:
        """Yield the events of a stream with the whole answer in few deltas."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which has begun."""
        ...

    def remember(self, call: Call, answered: Answered, memory: Memory) -> None:
        """Keep what later requests refer to."""
        ...


def remember_arguments(answered: Answered, memory: Memory) -> None:
    """Keep the text of the arguments of each tool call of an answer."""
    for call in answered.completion.answer.message.get("tool_calls") or ():
        memory.arguments[call["id"]] = call["function"]["arguments"]
