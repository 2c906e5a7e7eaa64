"""Lets a policy call the tools of verl, or has an interaction of verl answer the policy.

Both are subclasses, of verl's BaseTool and BaseInteraction, which a YAML file of verl names.

tools         extra_info has `tools_kwargs`: tool name -> create_kwargs, execute_kwargs,
              calc_reward_kwargs, release_kwargs
interaction   extra_info has `interaction_kwargs`: the name of the interaction, if the YAML has more
              than one, and what its methods get
"""

import importlib
import inspect
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.adapters import describe_failure, load_named
from mcore_rl.agents.environments.environment import Message, Start, Step, ToolUnavailableError
from mcore_rl.agents.environments.tools_env import (
    ToolCalls,
    ToolEpisode,
    ToolOutcome,
    check_bounds,
    write_text,
)
from mcore_rl.data.rows import get_mapping


@cache
def read_config(path: str, section: str) -> list[dict[str, Any]]:
    """Return the entries of a section, `tools` or `interaction`; ValueError if there are none."""
    yaml = importlib.import_module("yaml")
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"config is {path!r}, which is no YAML: {error}") from error
    entries = content.get(section) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all("class_name" in entry for entry in entries):
        raise ValueError(f"{path} has no list {section!r} whose entries have a class_name")
    return entries


def load_class(class_name: str) -> Any:
    """Return the class that verl's `package.module.Class` names."""
    return load_named(":".join(class_name.rpartition(".")[::2]))


def check_classes(path: str, section: str) -> None:
    """Raise ValueError, with a remedy, if a class that a section names cannot be imported."""
    for entry in read_config(path, section):
        name = entry["class_name"]
        try:
            load_class(name)
        except ValueError as error:
            raise ValueError(f"config is {path!r}, with class_name {name}: {error}") from error
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ValueError(
                f"config is {path!r}, with class_name {name}: {describe_failure(error)}"
            ) from error


def check_file(path: str) -> None:
    """Raise ValueError if there is no such file."""
    if not Path(path).expanduser().is_file():
        raise ValueError(f"config is {path!r}: there is no such file")


@dataclass(frozen=True)
class VerlToolsOptions:
    """Which tools, and which of their rewards count.

    config       YAML file with `tools`, as verl's tool_config_path names it
    step_reward  whether the rewards of calls count
    calc_reward  whether calc_reward of each tool is added at the end
    reward, instructions, tool_timeout_s, result_len, max_turns
                 as in ToolsOptions
    """

    config: str
    step_reward: bool = True
    calc_reward: bool = True
    reward: str = ""
    instructions: str = ""
    tool_timeout_s: float = 30.0
    result_len: int = 8000
    max_turns: int = 0

    def __post_init__(self) -> None:
        check_file(self.config)
        check_bounds(self.tool_timeout_s, self.result_len, self.max_turns)
        if self.reward:
            load_named(self.reward)

    def check_imports(self) -> None:
        native_tools(self.config)
        check_classes(self.config, "tools")


class VerlToolsEnvironment:
    """One episode, which has an instance of each tool. The tools are the worker's, as in verl."""

    def __init__(self, options: VerlToolsOptions) -> None:
        self._options = options
        self._tools: dict[str, Any] = load_tools(options.config)
        self._instances: dict[str, str] = {}
        self._keywords: Mapping[str, Any] = {}
        calls = ToolCalls(self._call, list(self._tools), options.tool_timeout_s, options.result_len)
        schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            for tool in self._tools.values()
        ]
        self._episode = ToolEpisode(calls, schemas, options.max_turns, options.reward)

    async def reset(self, task: Mapping[str, Any]) -> Start:
        extra = task.get("extra_info") or {}
        self._keywords = get_mapping(extra, "tools_kwargs", "the task's extra_info")
        if extra.get("need_tools_kwargs") and not self._keywords:
            raise ValueError("the task's extra_info needs tools_kwargs, and has none")
        for name, tool in self._tools.items():
            given = self._take_given(name, "create_kwargs")
            # Older tools take the arguments themselves, newer ones a mapping of them.
            created = await tool.create(**{**given, "create_kwargs": given})
            self._instances[name] = created[0] if isinstance(created, tuple) else created
        return self._episode.start(task, self._options.instructions)

    async def step(self, message: Message) -> Step:
        step = await self._episode.step(message)
        if not step.done or not self._options.calc_reward:
            return step
        reward = step.reward
        for name, instance in self._instances.items():
            given = self._take_given(name, "calc_reward_kwargs")
            reward += float(await self._tools[name].calc_reward(instance, **given) or 0.0)
        return Step(step.messages, reward, step.done, step.metrics, step.end_reason)

    async def close(self) -> None:
        instances = dict(self._instances)
        self._instances.clear()
        for name, instance in instances.items():
            await self._tools[name].release(instance, **self._take_given(name, "release_kwargs"))

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        response, reward, metrics = await self._tools[name].execute(
            self._instances[name], arguments, **self._take_given(name, "execute_kwargs")
        )
        if away := (metrics or {}).get("api_request_error"):  # verl's SearchTool answers so
            raise ToolUnavailableError(f"verl's tool {name} gives no answer: {away}")
        return ToolOutcome(_text(response), float(reward or 0) * self._options.step_reward)

    def _take_given(self, name: str, which: str) -> dict[str, Any]:
        where = "the task's extra_info.tools_kwargs"
        return dict(get_mapping(get_mapping(self._keywords, name, where), which, f"{where}.{name}"))


@cache
def load_tools(config: str) -> dict[str, Any]:
    """Return the tools of a YAML file by name, made once in a process."""
    schema_class = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema
    tools: dict[str, Any] = {}
    for entry in native_tools(config):
        schema = entry.get("tool_schema")
        tool = load_class(entry["class_name"])(
            config=entry.get("config") or {},
            tool_schema=schema_class.model_validate(schema) if schema else None,
        )
        tools[tool.name] = tool
    return tools


def native_tools(config: str) -> list[dict[str, Any]]:
    """Return the entries of a YAML file's tools. Raises ValueError if one is of another type."""
    entries = read_config(config, "tools")
    for entry in entries:
        kind = (entry.get("config") or {}).get("type", "native")
        if kind != "native":
            raise ValueError(
                f"{config}: {entry['class_name']} is of type {kind!r}; only native tools "
                "are loaded here, MCP servers by the environment of kind mcp"
            )
    return entries


def _text(response: Any) -> str:
    """Return the text of a tool's response, which was text or a mapping in older versions."""
    if isinstance(response, str):
        return response
    text = response.get("text") if isinstance(response, Mapping) else response.text
    return text if isinstance(text, str) else write_text(text)


@dataclass(frozen=True)
class VerlInteractionOptions:
    """Which interactions.

    config     YAML file with `interaction`, as verl's interaction_config_path names it
    max_turns  answers at most; 0: any number
    """

    config: str
    max_turns: int = 0

    def __post_init__(self) -> None:
        check_file(self.config)
        if self.max_turns < 0:
            raise ValueError(f"max_turns is {self.max_turns}: at least 0")

    def check_imports(self) -> None:
        check_classes(self.config, "interaction")


class VerlInteractionEnvironment:
    """One episode: what generate_response says is the user's turn, its score the reward."""

    def __init__(self, options: VerlInteractionOptions) -> None:
        self._options = options
        self._interactions = load_interactions(options.config)
        self._interaction: Any = None
        self._instance = ""
        self._keywords: dict[str, Any] = {}
        self._conversation: list[Message] = []
        self._num_turns = 0

    async def reset(self, task: Mapping[str, Any]) -> Start:
        self._keywords = dict(
            get_mapping(task.get("extra_info") or {}, "interaction_kwargs", "the task's extra_info")
        )
        name = self._keywords.get("name")
        if name is None and len(self._interactions) == 1:
            name = next(iter(self._interactions))
        if name not in self._interactions:
            raise ValueError(
                f"interaction_kwargs.name of the task is {name!r}: {self._options.config} has "
                f"{', '.join(self._interactions)}"
            )
        self._interaction = self._interactions[name]
        self._instance = uuid.uuid4().hex
        await self._interaction.start_interaction(self._instance, **self._keywords)
        self._conversation = list(task.get("messages") or ())
        return Start(list(self._conversation))

    async def step(self, message: Message) -> Step:
        self._num_turns += 1
        self._conversation.append(message)
        ends, text, score, extra = await self._interaction.generate_response(
            self._instance, [dict(each) for each in self._conversation], **self._keywords
        )
        reply: Message = {"role": "user", "content": text}
        self._conversation.append(reply)
        is_last = self._num_turns == self._options.max_turns
        metrics = {
            name: float(value)
            for name, value in (extra or {}).items()
            if isinstance(value, int | float)
        }
        return Step(
            messages=[] if ends else [reply],
            reward=float(score or 0.0),
            done=bool(ends) or is_last,
            metrics={**metrics, "turns": float(self._num_turns)},
            end_reason="max_turns" if is_last and not ends else "",
        )

    async def close(self) -> None:
        if self._interaction is None:
            return
        finalize = self._interaction.finalize_interaction
        takes_instance = bool(inspect.signature(finalize).parameters)  # verl's base class does not
        await (finalize(self._instance) if takes_instance else finalize())


@cache
def load_interactions(config: str) -> dict[str, Any]:
    """Return the interactions of a YAML file by name, made once in a process."""
    interactions = {}
    for entry in read_config(config, "interaction"):
        given = dict(entry.get("config") or {})
        name = entry.get("name") or entry["class_name"].rpartition(".")[2]
        given.setdefault("name", name)
        interactions[name] = load_class(entry["class_name"])(config=given)
    return interactions
