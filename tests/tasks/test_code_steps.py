"""The small language: what is a program, and that a right program does what the words say."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.tasks.code_steps import (
    LARGEST,
    OPERATIONS,
    as_python,
    feedback,
    is_program,
    make_task,
)

tasks = st.builds(
    lambda seed, num: make_task(random.Random(seed), num), st.integers(0, 2**32), st.integers(1, 4)
)


@given(tasks, st.integers(0, 20), st.integers(1, 15))
def test_a_right_program_gives_the_value_that_is_asked_for(task, a: int, b: int) -> None:
    names: dict = {}
    exec(as_python(task.program), names)
    assert names["solve"]([[a, b]]) == [task.value(a, b)]


@given(tasks, st.integers(0, 2**32))
def test_right_and_mistaken_programs_are_programs(task, seed: int) -> None:
    assert is_program(task.program)
    assert is_program(task.make_mistakes(random.Random(seed), 0.5))
    assert task.make_mistakes(random.Random(seed), 0.0) == task.program


def test_operations_that_have_a_mistake_are_mixed_up() -> None:
    rng = random.Random(0)
    for operation in OPERATIONS:
        task = next(t for t in iter(lambda: make_task(rng, 1), None) if t.steps[0][0] == operation)
        assert (task.make_mistakes(rng, 1.0) != task.program) == bool(operation.mistake)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a = a + b ;",
        "b = a + 1",
        "a = a ** 9",
        "a = a + b\nimport os",
        "a = __import__ ( 'os' )",
        "a = a + 100",
        "a = a . b",
        " ; ".join(["a = a * a"] * 9),
    ],
)
def test_anything_else_is_no_program(text: str) -> None:
    assert not is_program(text)


def test_a_division_by_zero_costs_its_case_only() -> None:
    names: dict = {}
    exec(as_python("a = a // b"), names)
    assert names["solve"]([[4, 2], [4, 0]]) == [2, None]


def test_feedback_shows_numbers_that_the_vocabulary_has() -> None:
    assert feedback(3, 4, -5, 1000) == f"wrong : a = 3 b = 4 gives - 5 not {LARGEST}"
    assert feedback(3, 4, None, 0).endswith("gives nothing not 0")
