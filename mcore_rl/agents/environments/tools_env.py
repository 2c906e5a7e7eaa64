"""Lets a policy call Python functions; its answer without a call ends the episode.

Python function --type hints, docstring--> JSON schema --> policy --> calls of a message
                --all calls at once--> a message for each
"""

import asyncio
import enum
import inspect
import json
import re
import threading
import time
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.adapters import load_named
from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    Tool,
    ToolUnavailableError,
    add_text,
    cut,
)
from mcore_rl.process.errors import describe_error
from mcore_rl.services.sandbox.limits import SandboxError
from mcore_rl.services.search.client import SearchUnavailableError

_AWAY = (ToolUnavailableError, SearchUnavailableError, SandboxError)
"""Errors that say nothing of the policy. It must not read them as answers."""


_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(
    r"^\s*(args|arguments|parameters|returns|raises|yields|examples?):?\s*$", re.I
)
_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


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
        outcome = await self._guard(name, function.get("arguments") or "{}")
        self._count(name, outcome, time.monotonic() - began_s)
        return outcome

    async def _guard(self, name: str, text: Any) -> ToolOutcome:
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


def describe_tool(function: Callable[..., Any]) -> Tool:
    """Return the tool that a function is, in OpenAI's format.

    Parameters that begin with an underscore are not the policy's. The docstring's words before its
    first section describe the tool, its section Args the parameters; so does Annotated[int, "a
    count"]. Raises ValueError if a
    parameter has no type hint, or one that JSON has no form for.
    """
    name = getattr(function, "__name__", type(function).__name__)
    hints = typing.get_type_hints(function, include_extras=True)
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name.startswith("_"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name}: *{parameter.name} has no schema; name each parameter")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name} needs a type hint")
        schema = _schema(hints[parameter.name], f"tool {name}, parameter {parameter.name}")
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": summary,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin is typing.Annotated:
        texts = [note for note in arguments[1:] if isinstance(note, str)]
        return _schema(arguments[0], where) | ({"description": texts[0]} if texts else {})
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, where) for argument in arguments]}
    if (origin or hint) in (list, set, tuple, Sequence):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return {"type": "array"} | ({"items": _schema(items[0], where)} if items else {})
    if (origin or hint) in (dict, Mapping):
        values = {"additionalProperties": _schema(arguments[1], where)} if arguments else {}
        return {"type": "object"} | values
    raise ValueError(
        f"{where}: {hint} has no JSON schema; use str, int, float, bool, list, dict, Literal or an "
        "Enum"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the words before the first section, and what the section Args says by parameter."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, last = found.group(1).lower(), ""
        elif not section:
            summary.append(line.strip())
        elif section in ("args", "arguments", "parameters"):
            if entry := _ENTRY.match(line):
                last = entry.group(1)
                described[last] = entry.group(2).strip()
            elif last and line.strip():
                described[last] += f" {line.strip()}"
    return " ".join(part for part in summary if part), described


@dataclass(frozen=True)
class ToolsOptions:
    """Which functions are tools, and how they are called.

    functions       each as folder/file.py:function or module:function; a parameter `_task` gets the
                    task, `_state` a dict of the episode's own
    reward          function of (conversation, task) that returns the reward, named alike; it may be
                    a coroutine; empty: the reward is 0
    instructions    said after the task's messages
    tool_timeout_s  for one call
    result_len      characters of a result, at most; 0: any number
    max_turns       answers at most; 0: any number
    """

    functions: Sequence[str]
    reward: str = ""
    instructions: str = ""
    tool_timeout_s: float = 30.0
    result_len: int = 8000
    max_turns: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.functions, str) or not self.functions:
            raise ValueError(f"functions is {self.functions!r}: a list of folder/file.py:function")
        check_bounds(self.tool_timeout_s, self.result_len, self.max_turns)
        names = [describe_tool(load_named(name))["function"]["name"] for name in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"functions: two tools share a name among {', '.join(names)}")
        if self.reward:
            load_named(self.reward)


def check_bounds(tool_timeout_s: float, result_len: int, max_turns: int) -> None:
    """Raise ValueError if a bound has no sense."""
    if not tool_timeout_s > 0 or result_len < 0 or max_turns < 0:
        raise ValueError(
            f"tool_timeout_s is {tool_timeout_s}, result_len {result_len}, max_turns {max_turns}: "
            "more than 0, at least 0 and at least 0"
        )


class ToolEpisode:
    """The conversation of an episode with tools: what all adapters of tools share."""

    def __init__(self, calls: ToolCalls, tools: list[Tool], max_turns: int, reward: str) -> None:
        self._calls = calls
        self._tools = tools
        self._max_turns = max_turns
        self._reward = load_named(reward) if reward else None
        self._conversation: list[Message] = []
        self._task: Mapping[str, Any] = {}
        self._num_turns = 0

    def start(self, task: Mapping[str, Any], instructions: str) -> Start:
        self._task = task
        self._conversation = add_text(task.get("messages") or (), instructions)
        return Start(list(self._conversation), self._tools)

    async def step(self, message: Message) -> Step:
        """Carry out the calls of an answer; the episode ends with an answer that has none."""
        self._num_turns += 1
        self._conversation.append(message)
        is_last = not message.get("tool_calls")
        messages, reward = await self._calls.run(message)
        self._conversation.extend(messages)
        ends = is_last or self._num_turns == self._max_turns
        if ends:
            reward += await self._final_reward()
        return Step(
            messages=messages,
            reward=reward,
            done=ends,
            metrics={**self._calls.metrics, "turns": float(self._num_turns)},
            end_reason="" if is_last or not ends else "max_turns",
        )

    async def _final_reward(self) -> float:
        if self._reward is None:
            return 0.0
        return float(await call_either(self._reward, self._conversation, self._task))


class ToolsEnvironment:
    """One episode with Python functions as tools."""

    def __init__(self, options: ToolsOptions) -> None:
        self._options = options
        self._functions: dict[str, Callable[..., Any]] = {}
        tools = []
        for name in options.functions:
            function = load_named(name)
            tools.append(describe_tool(function))
            self._functions[tools[-1]["function"]["name"]] = function
        calls = ToolCalls(
            self._call, list(self._functions), options.tool_timeout_s, options.result_len
        )
        self._episode = ToolEpisode(calls, tools, options.max_turns, options.reward)
        self._hidden: dict[str, Any] = {}

    async def reset(self, task: Mapping[str, Any]) -> Start:
        self._hidden = {"_task": task, "_state": {}}
        return self._episode.start(task, self._options.instructions)

    async def step(self, message: Message) -> Step:
        return await self._episode.step(message)

    async def close(self) -> None:
        self._hidden.clear()

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        function = self._functions[name]
        parameters = inspect.signature(function).parameters
        if unknown := sorted(set(arguments) & {"_task", "_state"}):
            raise TypeError(f"{name} takes no {', '.join(unknown)}")
        hidden = {key: value for key, value in self._hidden.items() if key in parameters}
        result = await call_either(function, **arguments, **hidden)
        return ToolOutcome(result if isinstance(result, str) else write_text(result))


def write_text(value: Any) -> str:
    """Return a tool's result as text: JSON if it has that form."""
    return json.dumps(value, ensure_ascii=False, default=str)


async def call_either(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a coroutine function here, any other in a thread of its own.

    If nobody waits any more, the thread goes on and its result is dropped.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    def run() -> None:
        try:
            result, error = function(*arguments, **keywords), None
        except Exception as raised:  # whoever awaits the outcome gets it
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await outcome
