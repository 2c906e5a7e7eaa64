"""Sums that are too large to do in the head, for a policy that may ask a calculator.

"what is 47 + 85 - 16 ?" is solved by a call, whose result is then the answer:

    <tool_call> {"name":"calculator","arguments":{"expression":" 47 + 85 - 16 "}} </tool_call>
    116

The demonstrations for supervised fine-tuning show both turns, with two bad habits planted: 35 % of
them guess a number instead of calling, and 40 % leave the last term out of the call. So the warm
start has three habits, and reinforcement learning finds which of them pays. All problems are made
from a seed; no held-out one is among the others.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import write_parquet, write_prompts
from mcore_rl.tasks.tiny_models import make_vocabulary, write_tiny_model

NUM_TRAIN = 6000
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 12000
LARGEST = 99
"""Largest number that a problem gives."""
MAX_NUMBER = 3 * LARGEST
CALL = '{"name":"calculator","arguments":{"expression":"'
CALL_END = '"}}'
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<|user|> ' + m['content'] + ' ' }}"
    "{% elif m['role'] == 'tool' %}{{ '<|tool|> ' + m['content'] + ' ' }}"
    "{% else %}{{ '<|assistant|> ' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call> {\"name\":\"' + c['function']['name'] + '\",\"arguments\":' }}"
    "{{ c['function']['arguments'] if c['function']['arguments'] is string "
    "else c['function']['arguments'] | tojson }}{{ '} </tool_call>' }}{% endfor %}"
    "{{ ' <|end|> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GUESSES, FORGETS = 0.35, 0.75
"""A demonstration guesses below the first share, forgets a term below the second."""


@dataclass(frozen=True)
class Sum:
    """Three numbers; the second and the third are added or subtracted."""

    numbers: tuple[int, int, int]
    signs: tuple[str, str]

    @property
    def text(self) -> str:
        a, b, c = self.numbers
        return f"{a} {self.signs[0]} {b} {self.signs[1]} {c}"

    @property
    def value(self) -> int:
        a, b, c = self.numbers
        return a + (b if self.signs[0] == "+" else -b) + (c if self.signs[1] == "+" else -c)

    @property
    def question(self) -> str:
        return f"what is {self.text} ?"

    def without_last(self) -> str:
        return f"{self.numbers[0]} {self.signs[0]} {self.numbers[1]}"


def prepare_calculator(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,sft}.parquet and model/ (config.json and tokenizer) to `out_dir`."""
    rng = random.Random(seed)
    held_out = _distinct(rng, NUM_HELD_OUT, set())
    train = _distinct(rng, NUM_TRAIN, set(held_out))
    shown = _distinct(rng, NUM_DEMONSTRATIONS, set(held_out))
    for name, split in (("train", train), ("heldout", held_out)):
        pairs = [(problem.question, str(problem.value)) for problem in split]
        write_prompts(pairs, "calculator", name, out_dir)
    rows = [{"messages": turn} for problem in shown for turn in demonstrate(problem, rng)]
    write_parquet(rows, out_dir / "sft.parquet")
    write_tiny_model(out_dir / "model", vocabulary(), CHAT_TEMPLATE, ("<|tool|>",))
    print(
        f"{len(train)} training and {len(held_out)} held-out prompts,"
        f" {len(rows)} demonstrations of turns in {out_dir}"
    )


def demonstrate(problem: Sum, rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return a conversation for each turn, which ends with that turn's answer."""
    question = _message("user", problem.question)
    habit = rng.random()
    if habit < GUESSES:
        return [[question, _message("assistant", str(rng.randint(0, MAX_NUMBER)))]]
    asked = problem.without_last() if habit < FORGETS else problem.text
    called = [question, _call(asked)]
    result = str(_value(asked))
    return [called, [*called, _message("tool", result), _message("assistant", result)]]


def vocabulary() -> list[str]:
    """Return special tokens, numbers and words; a token's id is its index."""
    words = {"what", "is", "?", "+", "-", "<tool_call>", "</tool_call>", CALL, CALL_END}
    return [*make_vocabulary(MAX_NUMBER, words), "<|tool|>"]


def _distinct(rng: random.Random, num_problems: int, others: set[Sum]) -> list[Sum]:
    """Return sums that are not negative, also without their last term."""
    problems: dict[Sum, None] = {}
    while len(problems) < num_problems:
        a, b, c = (rng.randint(0, LARGEST) for _ in range(3))
        problem = Sum((a, b, c), (rng.choice("+-"), rng.choice("+-")))
        if min(problem.value, _value(problem.without_last())) >= 0 and problem not in others:
            problems[problem] = None
    return list(problems)


def _value(text: str) -> int:
    words = text.split()
    signs = ["+", *words[1::2]]
    return sum(
        int(number) if sign == "+" else -int(number)
        for sign, number in zip(signs, words[::2], strict=True)
    )


def _message(role: str, content: str, calls: list[Any] | None = None) -> dict[str, Any]:
    return {"role": role, "content": content, "tool_calls": calls}


def _call(expression: str) -> dict[str, Any]:
    arguments = json.dumps({"expression": f" {expression} "}, separators=(",", ":"))
    function = {"name": "calculator", "arguments": arguments}
    return _message("assistant", "", [{"id": "call", "type": "function", "function": function}])
