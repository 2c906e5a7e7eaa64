"""Leaves out of a conversation what does not change how the newest messages are rendered.

head           | segment | segment | segment | ... | segment | last answer
up to the first  an answer and what follows it
answer           of each kind the latest stays, and the last one; the others are left out

An excerpt is a conversation in the usual order of roles, as long as there are kinds of segments,
however long the whole is.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes

from mcore_rl.agents.messages import Message

_ROLES = frozenset({"user", "assistant", "tool"})
"""Templates may move messages of other roles, such as the system's."""


def make_excerpt(history: Sequence[Message], words: Collection[str]) -> list[Message] | None:
    """Return an excerpt of a conversation that ends with an answer.

    words   texts that the template looks for in messages, see `template_words`

    None: nothing can be left out, or what could be is not plain text without these words.
    """
    answers = [i for i, message in enumerate(history) if message.get("role") == "assistant"]
    segments = [history[start:stop] for start, stop in pairwise(answers)]
    latest = {_kind(segment): number for number, segment in enumerate(segments)}
    kept = {*latest.values(), len(segments) - 1}
    if len(kept) >= len(segments):
        return None
    excerpt = list(history[: answers[0]])
    for number, segment in enumerate(segments):
        if number in kept:
            excerpt += segment
        elif not all(_is_plain(message, words) for message in segment):
            return None
    return [*excerpt, history[answers[-1]]]


def refers_outside(excerpt: Sequence[Message], new: Sequence[Message]) -> bool:
    """Return whether a result in `new` answers a call that the excerpt does not show."""
    told = {message.get("tool_call_id") for message in new if message.get("role") == "tool"}
    calls = (call for message in excerpt for call in message.get("tool_calls") or ())
    return not told <= {call.get("id") for call in calls}


def template_words(template: str) -> frozenset[str] | None:
    """Return the texts with which a chat template compares parts of messages.

    Names, such as those of roles and types, and blanks are left out. None: it cannot be read.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return None
    places = (nodes.Compare, nodes.Call, nodes.Test)
    constants = (const.value for place in tree.find_all(places) for const in _constants(place))
    return frozenset(text for text in constants if isinstance(text, str) and not _is_name(text))


def _constants(place: nodes.Node) -> list[nodes.Const]:
    return list(place.find_all(nodes.Const))


def _is_name(text: str) -> bool:
    return all(letter.isalnum() or letter.isspace() or letter in "_-." for letter in text)


def _kind(segment: Sequence[Message]) -> tuple[Any, ...]:
    """Return what tells an answer with what follows it from others, but for the words."""
    answer, *following = segment
    return (
        bool(answer.get("reasoning_content")),
        bool(answer.get("content")),
        min(len(answer.get("tool_calls") or ()), 2),
        *dict.fromkeys(message.get("role") for message in following),
    )


def _is_plain(message: Message, words: Collection[str]) -> bool:
    if message.get("role") not in _ROLES:
        return False
    texts = [message.get("content") or "", message.get("reasoning_content") or ""]
    for call in message.get("tool_calls") or ():
        texts.append(call["function"].get("arguments") or "")
    return all(isinstance(text, str) for text in texts) and not any(
        word in text for text in texts for word in words
    )
