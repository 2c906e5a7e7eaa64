"""Countdown problems: reach a number from given ones, each used once, by steps that are checked.

"use 3 8 5 to reach 10" is solved by "8 + 5 = 13 high ; 13 - 3 = 10 reached": each step takes two
numbers that are left, puts their sum or difference in their place, and compares it with the number
to reach. All problems are made from a seed.

The demonstrations for supervised fine-tuning show this form only. Their arithmetic and comparisons
are right, but their steps are chosen at random and end where they happen to end. So imitation
solves a problem by luck alone, and reinforcement learning finds by exploration which step to take.
No held-out problem is among the others, also not with its numbers in another order.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.data.rows import write_parquet, write_prompts
from mcore_rl.tasks.tiny_models import make_vocabulary, write_tiny_model

NUM_TRAIN = 6000
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 40000
NUM_GIVEN = 3
GIVEN = (1, 9)
"""Smallest and largest number that a problem gives."""
MAX_NUMBER = NUM_GIVEN * GIVEN[1]


@dataclass(frozen=True)
class CountdownProblem:
    """Numbers to use, and the number to reach from them."""

    numbers: tuple[int, ...]
    target: int

    @property
    def question(self) -> str:
        return f"use {_join(self.numbers)} to reach {self.target}"

    @property
    def ground_truth(self) -> str:
        return f"{_join(self.numbers)} -> {self.target}"

    @property
    def identity(self) -> tuple[int, ...]:
        """Return a key that is equal for problems whose numbers differ only in order."""
        return (*sorted(self.numbers), self.target)


@dataclass(frozen=True)
class CountdownStep:
    """`a` and `b` are replaced by `result`; `text` is "8 + 5 = 13"."""

    text: str
    result: int


def prepare_countdown(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,sft}.parquet and model/ (config.json and tokenizer) to `out_dir`."""
    rng = random.Random(seed)
    held_out = _distinct_problems(rng, NUM_HELD_OUT)
    reserved = {problem.identity for problem in held_out}
    train = _problems_outside(reserved, rng, NUM_TRAIN)
    demonstrated = _problems_outside(reserved, rng, NUM_DEMONSTRATIONS)
    for name, split in (("train", train), ("heldout", held_out)):
        write_prompts([(p.question, p.ground_truth) for p in split], "countdown", name, out_dir)
    write_parquet(
        [{"messages": _conversation(p, rng)} for p in demonstrated], out_dir / "sft.parquet"
    )
    write_tiny_model(out_dir / "model", vocabulary())
    print(
        f"{len(train)} training and {len(held_out)} held-out prompts,"
        f" {len(demonstrated)} demonstrations in {out_dir}"
    )


def demonstrate(problem: CountdownProblem, rng: random.Random) -> str:
    """Return steps chosen at random, each compared with the number to reach."""
    return " ; ".join(
        f"{step.text} {compare(step.result, problem.target)}"
        for step in random_steps(problem.numbers, rng)
    )


def random_steps(numbers: Sequence[int], rng: random.Random) -> list[CountdownStep]:
    """Return steps that use each number once; no result is below 0."""
    left = list(numbers)
    steps = []
    while len(left) > 1:
        rng.shuffle(left)
        a, b = left.pop(), left.pop()
        if rng.random() < 0.5:
            step = CountdownStep(f"{a} + {b} = {a + b}", a + b)
        else:
            step = CountdownStep(f"{max(a, b)} - {min(a, b)} = {abs(a - b)}", abs(a - b))
        steps.append(step)
        left.append(step.result)
    return steps


def compare(number: int, target: int) -> str:
    if number == target:
        return "reached"
    return "low" if number < target else "high"


def vocabulary() -> list[str]:
    """Return special tokens, numbers and words; a token's id is its index."""
    words = {"use", "to", "reach", "+", "-", "=", ";", "low", "high", "reached"}
    return make_vocabulary(MAX_NUMBER, words)


def _make_problem(rng: random.Random) -> CountdownProblem:
    numbers = tuple(rng.randint(*GIVEN) for _ in range(NUM_GIVEN))
    return CountdownProblem(numbers, random_steps(numbers, rng)[-1].result)


def _distinct_problems(rng: random.Random, num_problems: int) -> list[CountdownProblem]:
    problems: dict[tuple[int, ...], CountdownProblem] = {}
    while len(problems) < num_problems:
        problem = _make_problem(rng)
        problems.setdefault(problem.identity, problem)
    return list(problems.values())


def _problems_outside(
    reserved: set[tuple[int, ...]], rng: random.Random, num_problems: int
) -> list[CountdownProblem]:
    problems: list[CountdownProblem] = []
    while len(problems) < num_problems:
        problem = _make_problem(rng)
        if problem.identity not in reserved:
            problems.append(problem)
    return problems


def _conversation(problem: CountdownProblem, rng: random.Random) -> list[dict[str, str]]:
    answer = demonstrate(problem, rng)
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]


def _join(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
