"""Stand-ins for the recorder behind a gateway: deterministic policies that keep all requests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.gateway.normal import make_assistant_message, make_tool_call, normalize_message
from mcore_rl.agents.messages import Answer, ChatRequest, Completion, Message

Policy = Callable[[ChatRequest, int], Message]


def count_aloud(request: ChatRequest, turn: int) -> Message:
    """Say the last message and the number of the turn."""
    return make_assistant_message(f"{turn}: {request.messages[-1]['content']}")


def say(*messages: Message) -> Policy:
    """Return a policy that says these in turn."""
    return lambda request, turn: messages[turn]


def think_and_call(*arguments: str, content: str = "") -> Message:
    """Return a message that calls a tool once for each of these arguments."""
    calls = [make_tool_call(f"call_{i}", "look", text) for i, text in enumerate(arguments)]
    return make_assistant_message(content, "let me see", calls)


@dataclass
class RecordingChat:
    """An EpisodeChat that keeps requests and rewards.

    gate       answers come only while it is set, if there is one
    failures   raised by the next calls, in this order
    strangers  messages of the assistant that came in requests and were never answers
    """

    policy: Policy = count_aloud
    gate: asyncio.Event | None = None
    failures: list[Exception] = field(default_factory=list)
    requests: list[ChatRequest] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[tuple[float, int | None]] = field(default_factory=list)
    strangers: list[Message] = field(default_factory=list)
    num_running: int = 0

    async def complete(self, request: ChatRequest) -> Completion:
        turn = len(self.requests)
        self.requests.append(request)
        self.strangers += [
            message
            for message in request.messages
            if message["role"] == "assistant" and message not in self.answers
        ]
        self.num_running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.num_running -= 1
        if self.failures:
            raise self.failures.pop(0)
        message = self.policy(request, turn)
        self.answers.append(normalize_message(message))
        return completion_of(message, turn)

    def add_reward(self, reward: float, turn: int | None) -> None:
        if turn is not None and turn >= len(self.answers):
            raise ValueError(f"the episode has no turn {turn}")
        self.rewards.append((reward, turn))


def completion_of(message: Message, turn: int = 0, prompt: Sequence[int] = (5, 6)) -> Completion:
    """Return the completion of a message; its tokens are the letters of its content."""
    token_ids = tuple(ord(letter) for letter in message.get("content") or "")
    logprobs = tuple(-0.5 - position for position in range(len(token_ids)))
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Completion(turn, Answer(message), tuple(prompt), token_ids, logprobs, reason)
