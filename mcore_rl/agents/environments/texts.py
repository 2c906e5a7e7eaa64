"""Reads and adds to the text of messages."""

from collections.abc import Sequence

from mcore_rl.agents.environments.environment import Message


def text_of(message: Message) -> str:
    """Return the text of a message, whose content is a string, a list of parts or null."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` said by the user at the end.

    It joins a last message of the user, as many chat templates want the roles to alternate.
    """
    if not text:
        return list(messages)
    if messages and messages[-1].get("role") == "user":
        last = messages[-1]
        joined = f"{text_of(last)}\n\n{text}"
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
