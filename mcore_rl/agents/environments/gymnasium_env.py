"""Runs an environment of gymnasium by text: observations are described, actions are parsed."""

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step, add_text, join_texts

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class GymnasiumOptions:
    """How an environment of gymnasium is described, and how answers become actions.

    id                what gymnasium.make takes, such as CartPole-v1 or module:Name-v0
    make_options      further arguments of gymnasium.make
    instructions      said before the first observation
    observation       template: {observation} is its text, {values[0]} one number of it, {step} the
                      number of actions so far, {reward} that of the last action
    decimals          places that numbers are rounded to
    buckets           bounds for each number of the observation, in rising order: the text is then
                      one of `symbols` per number, for the number of bounds below it; a number
                      without bounds is left out
    symbols           of the buckets
    labels            written before each number or its symbol, and words of their own then:
                      "x3 v0" instead of "30"; for models whose tokenizer knows such words
    actions           names of discrete actions, in their order; empty: numbers
    action_pattern    regular expression that finds the action in an answer, by its first group if
                      it has one; the last match counts; empty: any name or number
    parse_penalty     taken from the reward for an answer without an action
    max_parse_errors  as many end the episode
    action_repeat     how often each action is taken; the rewards add up
    max_steps         actions at most; 0: as the environment has it
    same_start        samples of a prompt begin alike: the seed is the task's extra_info.seed or
                      else its index, instead of the sample's own seed
    """

    id: str
    make_options: Mapping[str, Any] = field(default_factory=dict)
    instructions: str = ""
    observation: str = "{observation}"
    decimals: int = 3
    buckets: Sequence[Sequence[float]] = ()
    symbols: str = "0123456789abcdefghijklmnopqrstuvwxyz"
    labels: Sequence[str] = ()
    actions: Sequence[str] = ()
    action_pattern: str = ""
    parse_penalty: float = 0.0
    max_parse_errors: int = 3
    action_repeat: int = 1
    max_steps: int = 0
    same_start: bool = True

    def __post_init__(self) -> None:
        if self.action_repeat < 1:
            raise ValueError(f"action_repeat is {self.action_repeat}: at least 1")
        if self.max_parse_errors < 1 or self.max_steps < 0:
            raise ValueError(
                f"max_parse_errors is {self.max_parse_errors} and max_steps {self.max_steps}: "
                "at least 1 and 0"
            )
        for bounds in self.buckets:
            if list(bounds) != sorted(bounds) or len(bounds) >= len(self.symbols):
                raise ValueError(
                    f"buckets {list(bounds)}: bounds in rising order, fewer than the "
                    f"{len(self.symbols)} symbols"
                )
        if len(set(self.actions)) != len(self.actions) or not all(self.actions):
            raise ValueError(f"actions {list(self.actions)}: each needs a name of its own")
        try:
            re.compile(self.action_pattern)
        except re.error as error:
            raise ValueError(f"action_pattern {self.action_pattern!r}: {error}") from error
        self.describe([0.0] * max(64, len(self.buckets)), "", 0, 0.0)

    def check_imports(self) -> None:
        gymnasium = importlib.import_module("gymnasium")
        module, _, name = self.id.rpartition(":")
        if module:
            importlib.import_module(module)
        try:
            gymnasium.spec(name)
        except gymnasium.error.Error as error:
            raise ValueError(f"id is {self.id!r}: {error}") from error

    def describe(self, values: Sequence[float], text: str, step: int, reward: float) -> str:
        """Fill the template; ValueError if it asks for something that there is not."""
        try:
            return self.observation.format(
                observation=text, values=values, step=step, reward=self.round_number(reward)
            )
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"observation {self.observation!r}: {error!r}; it may use {{observation}}, "
                "{values[0]}, {step} and {reward}"
            ) from error

    def round_number(self, value: float) -> float | int:
        """Round a number as observations have it; whole numbers lose their point."""
        near = round(float(value), self.decimals)
        return int(near) if math.isfinite(near) and near == int(near) else near

    def bucket_text(self, values: Sequence[float]) -> str:
        """Return a symbol for each number that has bounds, with its label."""
        if len(values) != len(self.buckets):
            raise ValueError(
                f"{self.id} observes {len(values)} numbers, buckets has bounds for "
                f"{len(self.buckets)}: give a list for each number, [] to leave it out"
            )
        words = [
            label + self.symbols[sum(bound < value for bound in bounds)]
            for value, bounds, label in zip(
                values, self.buckets, self.find_labels(values), strict=True
            )
            if bounds
        ]
        return (" " if self.labels else "").join(words)

    def number_text(self, values: Sequence[float]) -> str:
        """Return the rounded numbers, with their labels."""
        labels = self.find_labels(values)
        pairs = zip(labels, values, strict=True)
        return " ".join(f"{label}{self.round_number(value)}" for label, value in pairs)

    def find_labels(self, values: Sequence[float]) -> Sequence[str]:
        """Return a label for each number, empty ones without `labels`."""
        if not self.labels:
            return [""] * len(values)
        if len(values) != len(self.labels):
            raise ValueError(
                f"{self.id} observes {len(values)} numbers, labels has {len(self.labels)}: give one"
                " for each number"
            )
        return self.labels


class GymnasiumEnvironment:
    """One episode. Its spaces are discrete, boxes, several discrete ones, or tuples of these."""

    def __init__(self, options: GymnasiumOptions) -> None:
        gymnasium = importlib.import_module("gymnasium")
        self._options = options
        limit = {"max_episode_steps": options.max_steps} if options.max_steps else {}
        self._env = gymnasium.make(options.id, **limit, **options.make_options)
        self._actions = _Actions(self._env.action_space, options)
        self._num_steps = 0
        self._num_parse_errors = 0

    def reset(self, task: Mapping[str, Any]) -> Start:
        seed = int(task.get("seed") or 0)
        if self._options.same_start:
            seed = int((task.get("extra_info") or {}).get("seed", task.get("index") or 0))
        observation, _ = self._env.reset(seed=seed)
        text = self._text(observation, 0.0)
        if self._options.instructions:
            text = f"{self._options.instructions}\n\n{text}"
        return Start(add_text(task.get("messages") or (), text))

    def step(self, message: Message) -> Step:
        action = self._actions.parse(join_texts(message))
        if action is None:
            return self._answer_without_action()
        total, done, observation = 0.0, False, None
        for _ in range(self._options.action_repeat):
            observation, reward, terminated, truncated, _ = self._env.step(action)
            total += float(reward)
            self._num_steps += 1
            done = bool(terminated or truncated)
            if done:
                break
        return self._step(self._text(observation, total), total, done)

    def close(self) -> None:
        self._env.close()

    def _answer_without_action(self) -> Step:
        self._num_parse_errors += 1
        ends = self._num_parse_errors >= self._options.max_parse_errors
        text = f"This answer has no action. {self._actions.hint}"
        return self._step(text, -self._options.parse_penalty, ends, "parse_error" if ends else "")

    def _step(self, text: str, reward: float, done: bool, end_reason: str = "") -> Step:
        metrics: dict[str, float] = {}
        if done:
            metrics = {"steps": self._num_steps, "parse_errors": self._num_parse_errors}
        messages: list[Message] = [] if done else [{"role": "user", "content": text}]
        return Step(messages, reward, done, metrics, end_reason)

    def _text(self, observation: Any, reward: float) -> str:
        values = _numbers(observation)
        if self._options.buckets:
            text = self._options.bucket_text(values)
        elif isinstance(observation, str):
            text = observation
        else:
            text = self._options.number_text(values)
        rounded = [self._options.round_number(value) for value in values]
        return self._options.describe(rounded, text, self._num_steps, reward)


class _Actions:
    """Finds the action of an answer. `hint` tells the policy how one looks."""

    def __init__(self, space: Any, options: GymnasiumOptions) -> None:
        self._space = space
        self._names = list(options.actions)
        self._kind = type(space).__name__
        if self._kind not in ("Discrete", "MultiDiscrete", "Box"):
            raise ValueError(
                f"{options.id} takes actions of {space}: only Discrete, MultiDiscrete and Box "
                "can be read from text; wrap it into an environment of your own"
            )
        if self._names and (self._kind != "Discrete" or len(self._names) != space.n):
            raise ValueError(f"{options.id} takes actions of {space}, not {self._names}")
        self._num_numbers = 1 if self._kind == "Discrete" else math.prod(space.shape)
        pattern = options.action_pattern
        if self._names and not pattern:
            longest_first = sorted(self._names, key=len, reverse=True)
            pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
        self._pattern = re.compile(pattern) if pattern else None
        self.hint = self._make_hint()

    def parse(self, answer: str) -> Any:
        """Return the action, or None."""
        if self._pattern is not None:
            matches = list(self._pattern.finditer(answer))
            if not matches:
                return None
            answer = matches[-1].group(1 if self._pattern.groups else 0) or ""
        if self._names:
            name = answer.strip()
            known = name in self._names
            return self._names.index(name) + int(self._space.start) if known else None
        numbers = [float(number) for number in _NUMBER.findall(answer)]
        numbers = numbers[-self._num_numbers :]
        if len(numbers) < self._num_numbers or not all(map(math.isfinite, numbers)):
            return None
        return self._from_numbers(numbers)

    def _from_numbers(self, numbers: list[float]) -> Any:
        if self._kind != "Box" and any(number != int(number) for number in numbers):
            return None
        if self._kind == "Discrete":
            action = int(numbers[0])
            return action if self._space.contains(action) else None
        numpy = importlib.import_module("numpy")
        action = numpy.array(numbers).reshape(self._space.shape)
        if self._kind == "Box":
            action = numpy.clip(action, self._space.low, self._space.high)
        action = action.astype(self._space.dtype)
        return action if self._space.contains(action) else None

    def _make_hint(self) -> str:
        if self._names:
            return f"Answer with one of: {', '.join(self._names)}."
        if self._kind == "Discrete":
            first = int(self._space.start)
            return f"Answer with a number from {first} to {first + int(self._space.n) - 1}."
        return f"Answer with {self._num_numbers} numbers of {self._space}."


def _numbers(observation: Any) -> list[float]:
    """Return the numbers of an observation, in order; those of a mapping in its order."""
    if isinstance(observation, str):
        return []
    if isinstance(observation, Mapping):
        return [number for part in observation.values() for number in _numbers(part)]
    if isinstance(observation, tuple | list):
        return [number for part in observation for number in _numbers(part)]
    if hasattr(observation, "ravel"):
        return [float(number) for number in observation.ravel().tolist()]
    return [float(observation)]
