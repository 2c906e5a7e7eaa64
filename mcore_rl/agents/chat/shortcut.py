"""Renders excerpts instead of long conversations, where this is known to change nothing.

start   trials: a few hundred conversations, rendered both ways, must not differ
run     one of CHECK_EVERY excerpts is rendered both ways; a difference ends the use of excerpts

Leaves out of a conversation what does not change how the newest messages are rendered.

head           | segment | segment | segment | ... | segment | last answer
up to the first  an answer and what follows it
answer           of each kind the latest stays, and the last one; the others are left out

An excerpt is a conversation in the usual order of roles, as long as there are kinds of segments,
however long the whole is.

Conversations of several turns, with which a chat template is tried before the first episode.
"""

import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes

from mcore_rl.agents.chat.template import make_trial_call
from mcore_rl.agents.messages import Message, Tool

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


def does_refer_outside(excerpt: Sequence[Message], new: Sequence[Message]) -> bool:
    """Return whether a result in `new` answers a call that the excerpt does not show."""
    told = {message.get("tool_call_id") for message in new if message.get("role") == "tool"}
    calls = (call for message in excerpt for call in message.get("tool_calls") or ())
    return not told <= {call.get("id") for call in calls}


def find_template_words(template: str) -> frozenset[str] | None:
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


_MOST_TURNS = 7


@dataclass(frozen=True)
class TrialTalk:
    """A conversation that ends with an answer, and the messages that follow it."""

    history: list[Message]
    new: list[Message]


@dataclass(frozen=True)
class _Kind:
    """The parts of an answer, and whether the user speaks after the results of its calls."""

    has_reasoning: bool
    has_content: bool
    num_calls: int
    user_follows: bool


def make_trial_talks(number: int, seed: int = 0) -> Iterator[TrialTalk]:
    """Yield random conversations; each repeats up to three kinds of turns."""
    generator = random.Random(seed)
    for _ in range(number):
        kinds = [_draw_kind(generator) for _ in range(generator.randint(1, 3))]
        yield _talk(generator, kinds)


def _draw_kind(generator: random.Random) -> _Kind:
    num_calls = generator.choice((0, 0, 1, 1, 2))
    return _Kind(
        has_reasoning=generator.random() < 0.5,
        has_content=not num_calls or generator.random() < 0.5,
        num_calls=num_calls,
        user_follows=not num_calls or generator.random() < 0.25,
    )


def _talk(generator: random.Random, kinds: list[_Kind]) -> TrialTalk:
    history: list[Message] = []
    if generator.random() < 0.5:
        history.append({"role": "system", "content": "Be brief."})
    new: list[Message] = [{"role": "user", "content": "Question first."}]
    for number in range(generator.randint(3, _MOST_TURNS)):
        history += new
        answer, new = _turn(generator.choice(kinds), number)
        history.append(answer)
    return TrialTalk(history, new)


def _turn(kind: _Kind, number: int) -> tuple[Message, list[Message]]:
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    if kind.has_content:
        answer["content"] = f"Text {number}."
    if kind.has_reasoning:
        answer["reasoning_content"] = f"Thought {number}."
    new: list[Message] = []
    for i in range(kind.num_calls):
        call_id = f"call{number:03}{i:02}"
        answer.setdefault("tool_calls", []).append(make_trial_call(call_id, f"value {number} {i}"))
        result = f"result {number} {i}"
        new.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if kind.user_follows:
        new.append({"role": "user", "content": f"Question {number}."})
    return answer, new


_log = logging.getLogger(__name__)

CHECK_EVERY = 64
NUM_TRIALS = 300
Follow = Callable[[Sequence[Message], Sequence[int], Sequence[Message], Sequence[Tool]], str | None]
"""Returns the text that follows an answer's ids, by (history, ids, new messages, tools)."""


class Shortcut:
    """Calls `follow` with as little of the conversation as gives the same; all of it at first."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._words: frozenset[str] | None = None
        """Texts that excerpts may not leave out; None: there are no excerpts."""
        self._num_excerpts = 0
        self.num_wrong = 0

    def open(self, template: Any, tool: Tool) -> bool:
        """Use excerpts from now on if none of the trials differs; return whether it does so.

        template   source of the chat template; several by name are not supported
        """
        words = find_template_words(template) if isinstance(template, str) else None
        if words is None or not self._is_exact(words, [tool]):
            return False
        self._words = words
        return True

    def follow(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> str | None:
        excerpt = None if self._words is None else make_excerpt(history, self._words)
        if excerpt is None or does_refer_outside(excerpt, new):
            return self._follow(history, answer_ids, new, tools)
        found = self._follow(excerpt, answer_ids, new, tools)
        self._num_excerpts += 1
        if self._num_excerpts % CHECK_EVERY:
            return found
        right = self._follow(history, answer_ids, new, tools)
        if right != found:
            self.num_wrong += 1
            self._words = None
            _log.error(
                "the chat template renders messages after %d others as %r, and after the %d that"
                " were thought to suffice as %r; from now on whole conversations are rendered,"
                " which takes longer; please report it with the template",
                len(history),
                right,
                len(excerpt),
                found,
            )
        return right

    def _is_exact(self, words: frozenset[str], tools: Sequence[Tool]) -> bool:
        for talk in make_trial_talks(NUM_TRIALS):
            excerpt = make_excerpt(talk.history, words)
            if excerpt is None:
                continue
            found = self._follow(excerpt, (), talk.new, tools)
            if found != self._follow(talk.history, (), talk.new, tools):
                return False
        return True
