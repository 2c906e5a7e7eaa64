"""Defines an environment: it gives messages, takes the policy's answers, and rewards them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    """How a program that played a whole episode by itself ended.

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


class ProgramEpisode(Protocol):
    """An episode that a program plays by itself, against a base URL instead of messages."""

    async def run(self, task: Mapping[str, Any], deadline_s: float) -> ProgramResult:
        """Play the episode in at most `deadline_s` seconds; leave no process if canceled."""
        ...
