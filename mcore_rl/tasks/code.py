"""Programming problems in three difficulties, with public and hidden tests, made from a seed.

"add b , at most 9 , subtract it from 4" is solved by

    a = a + b ; a = min ( a , 9 ) ; a = 4 - a

Difficulty is the number of steps. The demonstrations for supervised fine-tuning have a bad habit:
where two operations are easily mixed up (least and most, remainder and quotient, which is
subtracted from which), 65 % write the other one. Some of them show a second attempt after the
result of a public test; it is no better, so that reinforcement learning finds what pays.

No held-out problem gives the same values as a problem of the other sets. `check_overlap` finds
held-out problems, of any data set, whose statement or tests occur in a training set.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import (
    Row,
    get_mapping,
    ground_truth_of,
    load_rows,
    messages_of,
    write_parquet,
)
from mcore_rl.tasks.code_steps import (
    LARGEST,
    StepsTask,
    as_python,
    feedback,
    make_task,
    number_shown,
    words_of,
)
from mcore_rl.tasks.tiny_models import make_vocabulary, write_tiny_model

RUN_LEN = 13
"""Words in a row that two statements share; shorter statements are compared as a whole."""
SHARE = 0.5
"""Share of a problem's runs of words, or of its tests, from which on it occurs elsewhere."""
NUM_TRAIN = {1: 30, 2: 1500, 3: 2500}
"""Problems by difficulty; there are few of one step."""
NUM_HELD_OUT = {1: 12, 2: 116, 3: 128}
NUM_DEMONSTRATED = {1: 1000, 2: 5000, 3: 6000}
NUM_PUBLIC = 2
NUM_HIDDEN = 6
MISTAKES = 0.65
"""Share of demonstrated steps that are mixed up, of those that can be."""
TEST_MISTAKES = 0.4
"""The same of unit tests."""
TESTED_STEPS = 2
NUM_TESTS = 3
"""Unit tests that are shown for each problem of at most TESTED_STEPS."""
LARGEST_TESTED = 40
TEST_TEXT = "test : "
"""Said before a problem to who is to write a unit test for it."""
_PROBES = tuple((a, b) for a in (0, 1, 3, 7, 12, 20) for b in (1, 4, 9, 15))
"""Two problems with equal values here count as the same."""


@dataclass(frozen=True)
class Overlap:
    """A held-out problem that occurs in the training set: `what` of it, at which row there."""

    held_out: str
    what: str
    train: str


def check_overlap(train: Sequence[str], held_out: Sequence[str]) -> None:
    """Print every held-out problem that occurs in the training files.

    Raises RuntimeError with their number if there are any.
    """
    num_held_out = sum(1 for _ in load_rows(held_out))
    found = find_overlaps(load_rows(train), load_rows(held_out))
    for overlap in found:
        print(f"{overlap.held_out}: its {overlap.what} occur in {overlap.train}")
    problems = {overlap.held_out for overlap in found}
    print(f"{len(problems)} of {num_held_out} held-out problems occur in the training set")
    if problems:
        raise RuntimeError(f"{len(problems)} held-out problems occur in the training set")


def find_overlaps(
    train: Iterator[tuple[str, Row]], held_out: Iterator[tuple[str, Row]]
) -> list[Overlap]:
    """Return the overlaps of (place, row) in verl's columns, in the order of the held-out rows."""
    places: list[str] = []
    index: dict[str, dict[str, list[int]]] = {"words": {}, "tests": {}}
    for number, (where, row) in enumerate(train):
        places.append(_name(where, row))
        for what, keys in _keys(row, where).items():
            for key in keys:
                index[what].setdefault(key, []).append(number)
    found = []
    for where, row in held_out:
        for what, keys in _keys(row, where).items():
            counts = Counter(number for key in keys for number in index[what].get(key, ()))
            if counts:
                [(number, count)] = counts.most_common(1)
                if count >= SHARE * len(keys):
                    found.append(Overlap(_name(where, row), what, places[number]))
    return found


def _keys(row: Row, where: str) -> Mapping[str, set[str]]:
    messages = messages_of(row, where)
    statement = " ".join(str(message["content"]) for message in messages)
    truth = ground_truth_of(row, where)
    return {"words": runs_of(statement), "tests": tests_of(truth)}


def runs_of(statement: str) -> set[str]:
    """Return every run of RUN_LEN words, without case and punctuation; the whole if it is short."""
    words = re.findall(r"\w+|[-+*/%<>=]", statement.lower())
    last = max(len(words) - RUN_LEN, 0)
    return {" ".join(words[i : i + RUN_LEN]) for i in range(last + 1)}


def tests_of(truth: Any) -> set[str]:
    """Return the tests of a ground truth, public ones included, each as a text."""
    tests = json.loads(truth) if isinstance(truth, str) else truth
    found = set(tests.get("asserts") or ())
    for group in (tests, tests.get("public") or {}):
        pairs = zip(group.get("inputs") or (), group.get("outputs") or (), strict=True)
        found |= {json.dumps([_plain(given), _plain(expected)]) for given, expected in pairs}
    return found


def _plain(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _name(where: str, row: Row) -> str:
    name = get_mapping(row, "extra_info", where).get("name")
    return f"{where} ({name})" if name else where


def prepare_code(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,sft,sft_roles}.parquet and model/ (config.json, tokenizer) to `out_dir`.

    sft has programs and repairs, for recipe tiny_agent_code; sft_roles programs and unit tests, for
    recipe tiny_cure.
    """
    rng = random.Random(seed)
    held_out = _tasks(rng, NUM_HELD_OUT, set(), distinct=True)
    reserved = set(map(behavior, held_out))
    train = _tasks(rng, NUM_TRAIN, reserved, distinct=True)
    demonstrated = _tasks(rng, NUM_DEMONSTRATED, reserved, distinct=False)
    for name, tasks in (("train", train), ("heldout", held_out)):
        rows = [problem_row(task, name, i, rng) for i, task in enumerate(tasks)]
        write_parquet(rows, out_dir / f"{name}.parquet")
    rows = [{"messages": turns} for task in demonstrated for turns in demonstrate(task, rng)]
    write_parquet(rows, out_dir / "sft.parquet")
    roles = [{"messages": turns} for task in demonstrated for turns in demonstrate_roles(task, rng)]
    write_parquet(roles, out_dir / "sft_roles.parquet")
    write_tiny_model(out_dir / "model", vocabulary())
    print(
        f"{len(train)} training and {len(held_out)} held-out problems,"
        f" {len(rows)} demonstrations of attempts in {out_dir}"
    )


def behavior(task: StepsTask) -> tuple[int, ...]:
    """Return a key that is equal for problems that ask for the same values."""
    return tuple(task.value(a, b) for a, b in _PROBES)


def problem_row(task: StepsTask, split: str, index: int, rng: random.Random) -> dict[str, Any]:
    """Return a row in verl's columns; its ground truth is JSON with public and hidden tests."""
    cases: dict[tuple[int, int], int] = {}
    while len(cases) < NUM_PUBLIC + NUM_HIDDEN:
        case = (rng.randint(0, 20), rng.randint(1, 15))
        cases[case] = task.value(*case)
    pairs = list(cases.items())
    truth = {
        "public": _tests(pairs[:NUM_PUBLIC]),
        **_tests(pairs[NUM_PUBLIC:]),
    }
    return {
        "prompt": [{"role": "user", "content": task.statement}],
        "data_source": "code_steps",
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": index, "difficulty": len(task.steps)},
    }


def demonstrate(task: StepsTask, rng: random.Random) -> list[list[dict[str, str]]]:
    """Return a conversation for each attempt, which ends with that attempt."""
    first = task.make_mistakes(rng, MISTAKES)
    asked = [_message("user", task.statement)]
    turns = [[*asked, _message("assistant", first)]]
    case = (rng.randint(0, 20), rng.randint(1, 15))
    got, wanted = value_of_program(first, *case), task.value(*case)
    if got != wanted:
        told = _message("user", feedback(*case, got, wanted))
        again = _message("assistant", task.make_mistakes(rng, MISTAKES))
        turns.append([*turns[0], told, again])
    return turns


def demonstrate_roles(task: StepsTask, rng: random.Random) -> list[list[dict[str, str]]]:
    """Return conversations of who writes a program, and of who writes unit tests.

    Only problems of at most two steps have unit tests: they are worked out step by step, which a
    tiny model learns for small numbers alone.
    """
    program = task.make_mistakes(rng, MISTAKES)
    written = [[_message("user", task.statement), _message("assistant", program)]]
    if len(task.steps) > TESTED_STEPS:
        return written
    asked = _message("user", f"{TEST_TEXT}{task.statement}")
    tests = (write_test(task, rng) for _ in range(NUM_TESTS))
    return [*written, *([asked, _message("assistant", test)] for test in tests if test)]


def write_test(task: StepsTask, rng: random.Random) -> str:
    """Return a unit test with the value after each step, "a = 3 b = 4 ; 7 ; 7".

    A share of the steps is mixed up. Empty if a value is large.
    """
    mistaken = task.make_mistakes(rng, TEST_MISTAKES)
    a, b = rng.randint(0, 5), rng.randint(1, 5)
    steps = mistaken.split(" ; ")
    programs = [" ; ".join(steps[: i + 1]) for i in range(len(steps))]
    values = [value_of_program(program, a, b) for program in programs]
    if any(value is None or abs(value) > LARGEST_TESTED for value in values):
        return ""
    return " ; ".join([f"a = {a} b = {b}", *map(number_shown, values)])


def value_of_program(program: str, a: int, b: int) -> int | None:
    """Return what a demonstrated program gives; only for programs that were made here."""
    names: dict[str, Any] = {}
    exec(as_python(program), names)
    return names["one"](a, b)


def vocabulary() -> list[str]:
    """Return special tokens, numbers and words; a token's id is its index."""
    return make_vocabulary(LARGEST, {*words_of(), "wrong", ":", "gives", "not", "nothing", "test"})


def _tests(pairs: Sequence[tuple[tuple[int, int], int]]) -> dict[str, Any]:
    return {"inputs": [list(case) for case, _ in pairs], "outputs": [value for _, value in pairs]}


def _tasks(
    rng: random.Random, nums: dict[int, int], reserved: set[tuple[int, ...]], *, distinct: bool
) -> list[StepsTask]:
    """Return problems outside of `reserved`; `distinct`: no two of them ask for the same."""
    tasks = []
    seen = set(reserved)
    for num_steps, num in nums.items():
        left = num
        while left:
            task = make_task(rng, num_steps)
            key = behavior(task)
            if key in seen:
                continue
            if distinct:
                seen.add(key)
            tasks.append(task)
            left -= 1
    rng.shuffle(tasks)
    return tasks


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
