"""Lets a policy search by calling a tool; its answer without a call ends the episode."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    Tool,
    ToolUnavailableError,
    text_of,
)
from mcore_rl.agents.environments.search_options import Searcher, SearchOptions, check_score
from mcore_rl.agents.environments.search_rewards import best_score
from mcore_rl.agents.environments.search_tags import action_of
from mcore_rl.agents.environments.tool_calls import ToolCalls, ToolOutcome
from mcore_rl.agents.environments.tools_env import ToolEpisode, call_either

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for passages about a topic.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what the passages shall be about"}
            },
            "required": ["query"],
        },
    },
}


@dataclass(frozen=True)
class SearchToolOptions(SearchOptions):
    """How episodes go and what they are worth; url and passages as in SearchOptions.

    instructions   said after the task's messages
    score          em, f1 or contains, of what stands in <answer> tags, or of the whole last answer
    format_score   of an answer that is wrong
    max_turns      answers at most; 0: any number
    """

    instructions: str = ""
    score: str = "em"
    format_score: float = 0.0
    max_turns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score(self.score)
        if self.max_turns < 0:
            raise ValueError(f"max_turns is {self.max_turns}: at least 0")


class SearchToolEnvironment:
    """One episode with the tool `search`."""

    def __init__(self, options: SearchToolOptions) -> None:
        self._options = options
        self._searcher = Searcher(options)
        # The client ends a call by its own deadline; that of _call is for what it cannot see.
        calls = ToolCalls(self._call, ["search"], options.deadline_s + 10.0, most_len=0)
        self._episode = ToolEpisode(calls, [TOOL], options.max_turns, reward="")
        self._truth: Any = None

    async def reset(self, task: Mapping[str, Any]) -> Start:
        self._truth = task.get("ground_truth")
        return self._episode.start(task, self._options.instructions)

    async def step(self, message: Message) -> Step:
        """Search, or end the episode. SearchUnavailableError or ToolUnavailableError: no answer."""
        step = await self._episode.step(message)
        metrics = {**step.metrics, **self._searcher.metrics}
        if not step.done or step.end_reason:
            return Step(step.messages, step.reward, step.done, metrics, step.end_reason)
        text = text_of(message)
        action = action_of(text)
        answer = action.content if action.kind == "answer" else text
        score = best_score(self._options.score, answer, self._truth)
        metrics["right"] = float(score == 1.0)
        return Step([], score if score else self._options.format_score, True, metrics)

    async def close(self) -> None:
        pass

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        if not isinstance(arguments.get("query"), str) or set(arguments) != {"query"}:
            return ToolOutcome("Error: search takes one text, query", failed=True)
        try:
            async with asyncio.timeout(self._options.deadline_s + 5.0):
                return ToolOutcome(await call_either(self._searcher.show, arguments["query"]))
        except (ValueError, TimeoutError) as error:  # refused, no passages, or no end
            raise ToolUnavailableError(f"the search gives no passages: {error}") from error
