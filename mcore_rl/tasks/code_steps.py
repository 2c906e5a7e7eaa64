"""A small language: programs of a few steps on a number, which a tiny model can write.

    a = a + b ; a = min ( a , 9 ) ; a = 4 - a

A program is Python, one token a word. Its few forms cannot harm anything, so many programs may
share a sandbox.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.rewards.code.languages import PairLanguage

_TERM = r"(?:a|b|\d{1,2})"
_STEP = rf"a = (?:{_TERM} (?:\+|-|\*|%|//) {_TERM}|(?:min|max) \( {_TERM} , {_TERM} \))"
_PROGRAM = re.compile(rf"{_STEP}(?: ; {_STEP})*")
_TEST = re.compile(r"a = (\d{1,2}) b = (\d{1,2})(?: ; (?:- )?\d{1,2})* ; ((?:- )?\d{1,2})")
MAX_STEPS = 8
"""Steps of a program; so many squares of a small number are still computed at once."""
LARGEST = 99
"""Largest number that feedback shows; others are shown as this."""
CONSTANTS = tuple(range(2, 10))


@dataclass(frozen=True)
class Operation:
    """A step in words, as Python, and as the Python of a common mistake ("" if there is none).

    {x} stands for b or a constant; `takes_b`: it may be b.
    """

    words: str
    code: str
    mistake: str = ""
    takes_b: bool = True


OPERATIONS = (
    Operation("add {x}", "a + {x}"),
    Operation("subtract {x}", "a - {x}"),
    Operation("multiply by {x}", "a * {x}"),
    Operation("subtract it from {x}", "{x} - a", "a - {x}"),
    Operation("at most {x}", "min ( a , {x} )", "max ( a , {x} )"),
    Operation("at least {x}", "max ( a , {x} )", "min ( a , {x} )"),
    Operation("remainder by {x}", "a % {x}", "a // {x}", takes_b=False),
)


@dataclass(frozen=True)
class StepsTask:
    """Operations, each with its operand, to be done one after the other."""

    steps: tuple[tuple[Operation, str], ...]

    @property
    def statement(self) -> str:
        return " , ".join(operation.words.format(x=x) for operation, x in self.steps)

    @property
    def program(self) -> str:
        return " ; ".join(f"a = {operation.code.format(x=x)}" for operation, x in self.steps)

    def make_mistakes(self, rng: random.Random, share: float) -> str:
        """Return its program with this share of the mistakes that can be made."""
        written = [
            operation.mistake if operation.mistake and rng.random() < share else operation.code
            for operation, _ in self.steps
        ]
        operands = [x for _, x in self.steps]
        return " ; ".join(f"a = {c.format(x=x)}" for c, x in zip(written, operands, strict=True))

    def value(self, a: int, b: int) -> int:
        """Return what a right program gives."""
        for operation, x in self.steps:
            operand = b if x == "b" else int(x)
            a = _APPLIED[operation.code](a, operand)
        return a


_APPLIED = {
    "a + {x}": lambda a, x: a + x,
    "a - {x}": lambda a, x: a - x,
    "a * {x}": lambda a, x: a * x,
    "{x} - a": lambda a, x: x - a,
    "min ( a , {x} )": min,
    "max ( a , {x} )": max,
    "a % {x}": lambda a, x: a % x,
}


def make_task(rng: random.Random, num_steps: int) -> StepsTask:
    steps = []
    for _ in range(num_steps):
        operation = rng.choice(OPERATIONS)
        is_b = operation.takes_b and rng.random() < 0.4
        steps.append((operation, "b" if is_b else str(rng.choice(CONSTANTS))))
    return StepsTask(tuple(steps))


def is_program(text: str) -> bool:
    """Return whether a text is a program of the language, and nothing else."""
    return bool(_PROGRAM.fullmatch(text)) and text.count(";") < MAX_STEPS


def as_python(program: str) -> str:
    """Return a Python function `solve(cases)`: the value of the program for each (a, b).

    A division by zero gives None for its case.
    """
    return (
        f"def one(a, b):\n    try:\n        {program}\n    except ZeroDivisionError:\n"
        f"        return None\n    return a\n\n"
        "def solve(cases):\n    return [one(a, b) for a, b in cases]\n"
    )


def to_python(answer: str) -> str | None:
    """Return `as_python` of a whole answer, None if it is no program."""
    text = answer.strip()
    return as_python(text) if is_program(text) else None


def read_test(answer: str) -> tuple[tuple[int, int], int] | None:
    """Return ((a, b), wanted value) of a unit test, None if the answer is none.

    The value is the last number; those before it are values after each step.
    """
    found = _TEST.fullmatch(answer.strip())
    return found and ((int(found[1]), int(found[2])), int(found[3].replace(" ", "")))


def words_of(operations: Sequence[Operation] = OPERATIONS) -> set[str]:
    """Return every word of statements and programs that is no number."""
    texts = [text for o in operations for text in (o.words, o.code, o.mistake)]
    words = {word for text in texts for word in text.format(x="b").split()}
    return {*words, "a", "b", "=", ";", ","}


def feedback(a: int, b: int, got: int | None, wanted: int | None) -> str:
    """Return what the policy is told of a public test that its program fails."""
    a_is, b_is, gives, should = map(number_shown, (a, b, got, wanted))
    return f"wrong : a = {a_is} b = {b_is} gives {gives} not {should}"


def number_shown(value: int | None) -> str:
    """Return a value in words of the vocabulary; large ones are cut to LARGEST."""
    if value is None:
        return "nothing"
    number = min(abs(value), LARGEST)
    return f"- {number}" if value < 0 else str(number)


STEPS = PairLanguage(to_python, feedback, read_test)
"""The language of the environment `code` with `language: steps`, and of recipes/rewards/cure.py."""
