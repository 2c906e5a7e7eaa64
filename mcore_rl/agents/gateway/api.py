"""Values that every API's translation shares: a client's call, its answer, and its memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcore_rl.agents.gateway.errors import ApiError
from mcore_rl.agents.gateway.fields import Body
from mcore_rl.agents.messages import ChatRequest, Completion, Message

DecodeToken = Callable[[int], str]
"""Returns the text of one token."""


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
        """Return the call of a request's body; raises BadRequest."""
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
