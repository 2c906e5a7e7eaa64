"""Renders excerpts instead of long conversations, where this is known to change nothing.

start   trials: a few hundred conversations, rendered both ways, must not differ
run     one of CHECK_EVERY excerpts is rendered both ways; a difference ends the use of excerpts
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from mcore_rl.agents.chat.excerpt import make_excerpt, refers_outside, template_words
from mcore_rl.agents.chat.trial_talks import trial_talks
from mcore_rl.agents.messages import Message, Tool

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
        words = template_words(template) if isinstance(template, str) else None
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
        if excerpt is None or refers_outside(excerpt, new):
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
        for talk in trial_talks(NUM_TRIALS):
            excerpt = make_excerpt(talk.history, words)
            if excerpt is None:
                continue
            found = self._follow(excerpt, (), talk.new, tools)
            if found != self._follow(talk.history, (), talk.new, tools):
                return False
        return True
