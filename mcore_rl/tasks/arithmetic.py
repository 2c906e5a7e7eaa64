"""Arithmetic word problems, a tokenizer for them and a tiny Qwen3-MoE configuration, all made from
a seed.

Training prompts carry right answers. The demonstrations for supervised fine-tuning are of mixed
quality, as crowd-written ones are: in SLIP_SHARE of the steps that subtract, they add instead. Most
of these steps are wrong, so greedy decoding after imitation repeats the mistake and solves only the
third of the problems that just add. Sampling still finds the right answer often enough for
reinforcement learning to correct it.

Held-out problems share templates, names, things and sums with the others, but no question occurs
twice.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import write_parquet, write_prompts
from mcore_rl.tasks.tiny_models import make_vocabulary, make_word_tokenizer, write_tiny_model

NUM_TRAIN = 6000
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 12000
SLIP_SHARE = 0.62
START = (10, 20)
"""Smallest and largest number that a problem starts with."""
OPERAND = (1, 9)
"""Smallest and largest number that a problem adds or subtracts."""
MAX_NUMBER = START[1] + 2 * OPERAND[1]
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "eggs", "nuts", "keys")
TEMPLATES = {
    "+": (
        "{name} has {a} {things} and gets {b} more . how many {things} does {name} have now ?",
        (
            "there are {a} {things} in the box . {name} puts in {b} . "
            "how many {things} are in the box ?"
        ),
        (
            "{name} found {a} {things} , {other} found {b} . "
            "how many {things} did they find together ?"
        ),
    ),
    "-": (
        "{name} has {a} {things} and loses {b} . how many {things} are left ?",
        (
            "there are {a} {things} in the box . {name} takes out {b} . "
            "how many {things} are in the box ?"
        ),
        (
            "{name} has {a} {things} and gives {b} to {other} . "
            "how many {things} does {name} have now ?"
        ),
    ),
    "+-": (
        "{name} has {a} {things} , gets {b} more and loses {c} . how many {things} are left ?",
        (
            "there are {a} {things} in the box . {name} puts in {b} and takes out {c} . "
            "how many are left ?"
        ),
    ),
}


@dataclass(frozen=True)
class ArithmeticProblem:
    """A number to start with, then `steps` of (operator, operand) applied in turn."""

    question: str
    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def answer(self) -> int:
        return self.start + sum(n if op == "+" else -n for op, n in self.steps)


def prepare_arithmetic(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,sft}.parquet and model/ (config.json and tokenizer) to `out_dir`."""
    rng = random.Random(seed)
    problems = list(_distinct_problems(rng, NUM_TRAIN + NUM_HELD_OUT + NUM_DEMONSTRATIONS))
    held_out = problems[:NUM_HELD_OUT]
    train = problems[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAIN]
    demonstrated = problems[NUM_HELD_OUT + NUM_TRAIN :]
    for name, split in (("train", train), ("heldout", held_out)):
        write_prompts([(p.question, str(p.answer)) for p in split], "arithmetic", name, out_dir)
    write_parquet(
        [{"messages": _conversation(p, rng)} for p in demonstrated], out_dir / "sft.parquet"
    )
    write_tiny_model(out_dir / "model", vocabulary())
    print(
        f"{len(train)} training and {len(held_out)} held-out prompts,"
        f" {len(demonstrated)} demonstrations in {out_dir}"
    )


def demonstrate(
    problem: ArithmeticProblem, rng: random.Random, slip_share: float = SLIP_SHARE
) -> str:
    """Return the worked answer, "12 + 5 = 17 ; 17 - 3 = 14"; `slip_share` of subtractions add
    instead.
    """
    total = problem.start
    lines = []
    for op, n in problem.steps:
        written = "+" if op == "-" and rng.random() < slip_share else op
        result = total + n if written == "+" else total - n
        lines.append(f"{total} {written} {n} = {result}")
        total = result
    return " ; ".join(lines)


def _conversation(problem: ArithmeticProblem, rng: random.Random) -> list[dict[str, str]]:
    answer = demonstrate(problem, rng)
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": answer}]


def _distinct_problems(rng: random.Random, num_problems: int) -> Iterator[ArithmeticProblem]:
    seen: set[str] = set()
    while len(seen) < num_problems:
        problem = _make_problem(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _make_problem(rng: random.Random) -> ArithmeticProblem:
    kind = rng.choice(tuple(TEMPLATES))
    name, other = rng.sample(NAMES, 2)
    a = rng.randint(*START)
    b = rng.randint(*OPERAND)
    c = rng.randint(*OPERAND)
    question = rng.choice(TEMPLATES[kind]).format(
        name=name, other=other, things=rng.choice(THINGS), a=a, b=b, c=c
    )
    return ArithmeticProblem(question, a, tuple(zip(kind, (b, c), strict=False)))


def vocabulary() -> list[str]:
    """Return special tokens, numbers and the words of the templates; a token's id is its index."""
    filled = " ".join(
        t.format(name="", other="", things="", a="", b="", c="")
        for ts in TEMPLATES.values()
        for t in ts
    )
    words = {*filled.split(), *NAMES, *THINGS, "+", "-", "=", ";"}
    return make_vocabulary(MAX_NUMBER, words)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per word and per number."""
    return make_word_tokenizer(vocabulary())
