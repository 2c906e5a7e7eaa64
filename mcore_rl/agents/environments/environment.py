"""Defines an environment: it gives messages, takes the policy's answers, and rewards them.

Errors of an episode's environment; the texts name worker, environment and task.

Images in messages, as OpenAI's chat format has them: parts with a data: URL.

Nothing here needs a package, so environments of any interpreter can use it.

Reads and adds to the text of messages.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class EpisodeError(RuntimeError):
    """The environment of an episode gives no answer; the episode is over."""


class EnvironmentLostError(EpisodeError):
    """The worker of an episode died or hangs. The episode may be tried again in another worker."""


class EnvironmentFailedError(EpisodeError):
    """The environment raised an error; the text has the end of its traceback."""


class EnvironmentTimeoutError(EnvironmentFailedError):
    """The environment did not answer in time, while its worker did."""


SCHEME = "data:"


def make_image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """Return the part of a message that shows an encoded image; `kind` as in image/png."""
    url = f"{SCHEME}image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_image_bytes(part: Mapping[str, Any]) -> bytes:
    """Return the encoded image of a part. Raises ValueError for a URL that is no data: URL."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, Mapping) else found
    header, comma, text = str(url).partition(",")
    if not header.startswith(SCHEME) or not header.endswith(";base64") or not comma:
        raise ValueError(
            f"an image at {url!r:.80}: nothing is fetched, so give its bytes as"
            " data:image/png;base64,..."
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image whose base64 is damaged: {error}") from error


def find_images(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the encoded images of messages, in order."""
    return [
        read_image_bytes(part)
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if part.get("type") == "image_url"
    ]


Message = Mapping[str, Any]
"""A chat message in OpenAI's format."""
Tool = Mapping[str, Any]
"""A function tool in OpenAI's format."""


@dataclass(frozen=True)
class Start:
    """How an episode begins: the conversation so far, and the tools that the policy may call.

    metrics   numbers of the episode, as those of a Step; an episode has them even if it ends before
              its first step
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The consequence of an answer of the policy.

    reward      for that answer; the episode's reward is the sum over its steps
    metrics     numbers of the episode so far, averaged over episodes, by name; that of a later step
                replaces that of an earlier one
    end_reason  why the episode is over, a value of agents.messages.EndReason; empty: it is done
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    end_reason: str = ""


class Environment(Protocol):
    """One episode. Methods may be coroutines; without them, they run in a thread of their own."""

    def reset(self, task: Mapping[str, Any]) -> Start:
        """Begin the episode of a task: the fields of agents.messages.Task, by name."""
        ...

    def step(self, message: Message) -> Step:
        """Take the policy's answer: an assistant message, with its tool calls."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ProgramResult:
    """How a program that ran a whole episode by itself ended.

    reward      None: the program gave none, and no command scored it
    end_reason  a value of agents.messages.EndReason
    detail      why it did not end as it should, with the end of its output; empty if it did
    """

    reward: float | None
    end_reason: str
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class ToolUnavailableError(RuntimeError):
    """A tool could not work, whatever the policy asked: a server is away, or broken.

    It ends the episode with `env_error`, while any other error of a tool is told to the policy.
    """


def join_texts(message: Message) -> str:
    """Return the text of a message, whose content is a string, a list of parts or null."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


def add_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` said by the user at the end.

    It joins a last message of the user, as many chat templates want the roles to alternate.
    """
    if not text:
        return list(messages)
    if messages and messages[-1].get("role") == "user":
        last = messages[-1]
        joined = f"{join_texts(last)}\n\n{text}"
        if not isinstance(last.get("content"), str):
            joined = [*(last.get("content") or ()), {"type": "text", "text": text}]
        return [*messages[:-1], {**last, "content": joined}]
    return [*messages, {"role": "user", "content": text}]


def cut(text: str, most: int) -> str:
    """Return `text` with its middle left out, and a note, if it is longer than `most` characters.

    The note comes on top of `most`; 0 stands for any length.
    """
    if not most or len(text) <= most:
        return text
    head = most - most // 2
    tail = text[len(text) - most // 2 :]
    return f"{text[:head]}\n[{len(text) - most} characters left out]\n{tail}"
