"""Ids of tool calls, each unique in an episode."""

import re
from collections.abc import Callable, Collection

KIMI_ID = re.compile(r"<\|tool_call_begin\|>\s*([\w.\-]+:\d+)\s*<")


class CallIds:
    """Makes the ids of a response's calls."""

    def __init__(self, tool_parser: str, new_id: Callable[[], str], taken: Collection[str]) -> None:
        """`taken`: ids of earlier calls in the episode."""
        self._is_kimi = tool_parser == "kimi_k2"
        self._new_id = new_id
        self._taken = set(taken)

    def make(self, name: str, written: str) -> str:
        """Return the id of a call of the tool `name`, whose text is `written`.

        Kimi writes ids itself, functions.NAME:NUMBER, and reads them in tool messages. Its own id
        is taken unless an earlier call has it.
        """
        call_id = self._kimi_id(name, written) if self._is_kimi else self._new_id()
        self._taken.add(call_id)
        return call_id

    def _kimi_id(self, name: str, written: str) -> str:
        match = KIMI_ID.search(written)
        if match and match[1] not in self._taken:
            return match[1]
        number = len(self._taken)
        while (call_id := f"functions.{name}:{number}") in self._taken:
            number += 1
        return call_id
