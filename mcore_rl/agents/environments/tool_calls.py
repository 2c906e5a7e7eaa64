"""Carries out the tool calls of a message, all at once, and answers each with a message."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.environment import Message, ToolUnavailableError, cut
from mcore_rl.process.errors import describe_error
from mcore_rl.services.sandbox.limits import SandboxError
from mcore_rl.services.search.client import SearchUnavailableError

_AWAY = (ToolUnavailableError, SearchUnavailableError, SandboxError)
"""Errors that say nothing of the policy. It must not read them as answers."""


@dataclass(frozen=True)
class ToolOutcome:
    """The answer of a tool, and what the call is worth."""

    text: str
    reward: float = 0.0
    failed: bool = False


class ToolCalls:
    """Calls tools by `call(name, arguments)`, and counts.

    An error, a timeout or arguments that are no JSON object become the text of a tool message: the
    policy may try again. Texts are cut to `most_len` characters; 0: never. `run` raises the errors
    of tools that cannot work: ToolUnavailableError, SearchUnavailableError and SandboxError.
    """

    def __init__(
        self,
        call: Callable[[str, dict[str, Any]], Awaitable[ToolOutcome]],
        names: list[str],
        timeout_s: float,
        most_len: int,
    ) -> None:
        self._call = call
        self._names = names
        self._timeout_s = timeout_s
        self._most_len = most_len
        self._counts: dict[str, float] = {}

    async def run(self, message: Message) -> tuple[list[Message], float]:
        """Return (a tool message for each call, in their order, the sum of their rewards)."""
        calls = message.get("tool_calls") or ()
        outcomes = await asyncio.gather(*(self._one(call["function"]) for call in calls))
        messages: list[Message] = [
            {
                "role": "tool",
                "tool_call_id": call.get("id", ""),
                "name": call["function"]["name"],
                "content": cut(outcome.text, self._most_len),
            }
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        return messages, sum(outcome.reward for outcome in outcomes)

    @property
    def metrics(self) -> dict[str, float]:
        """Calls, failures and seconds so far: of all tools, and by tool as tools/<name>/calls."""
        return dict(self._counts)

    async def _one(self, function: Mapping[str, Any]) -> ToolOutcome:
        name = function["name"]
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            outcome = ToolOutcome(f"Error: there is no tool {name}; there are: {known}", 0.0, True)
            self._count("unknown", outcome, 0.0)
            return outcome
        began_s = time.monotonic()
        outcome = await self._guarded(name, function.get("arguments") or "{}")
        self._count(name, outcome, time.monotonic() - began_s)
        return outcome

    async def _guarded(self, name: str, text: Any) -> ToolOutcome:
        try:
            arguments = json.loads(text) if isinstance(text, str) else dict(text)
        except ValueError as error:
            return ToolOutcome(f"Error: the arguments are not JSON: {error}", 0.0, True)
        if not isinstance(arguments, dict):
            return ToolOutcome("Error: the arguments are not a JSON object", 0.0, True)
        call = asyncio.ensure_future(self._call(name, arguments))
        try:
            done, _ = await asyncio.wait([call], timeout=self._timeout_s)
            if not done:
                return ToolOutcome(f"Error: {name} took more than {self._timeout_s:g} s", 0.0, True)
            return call.result()
        except _AWAY:
            raise
        except Exception as error:  # the policy reads it; the episode goes on
            return ToolOutcome(f"Error: {describe_error(error, 'it says no more')}", 0.0, True)
        finally:
            call.cancel()

    def _count(self, name: str, outcome: ToolOutcome, seconds: float) -> None:
        for prefix in ("tools", f"tools/{name}"):
            for what, number in (("calls", 1), ("failures", outcome.failed), ("seconds", seconds)):
                key = f"{prefix}/{what}"
                self._counts[key] = self._counts.get(key, 0.0) + number
