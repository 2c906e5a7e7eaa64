"""Has an interaction of verl, a subclass of its BaseInteraction, answer the policy.

The task's extra_info has `interaction_kwargs`: the name of the interaction, if the YAML has more
than one, and what its methods get.
"""

import inspect
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step
from mcore_rl.agents.environments.verl_tools import (
    check_classes,
    check_file,
    load_class,
    read_config,
)
from mcore_rl.data.rows import get_mapping


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
