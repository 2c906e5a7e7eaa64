"""The rule rewards beside the recipes, response by response."""

import pytest

from mcore_rl.rewards import user_function
from mcore_rl.rewards.user_function import load_function


def answer(rule: str, response: str, truth: str) -> tuple[float, float]:
    """(right, form)."""
    result = load_function(f"recipes/rewards/{rule}.py", "reward").call(("", response, truth, {}))
    return result["right"], result["form"]


@pytest.mark.parametrize(
    ("response", "truth", "right", "form"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### $18.00", "18", 1, 1),
        ("#### -5 \n", "-5", 1, 1),
        ("the answer is 12.", "12", 1, 0),
        ("#### 8 because 4 + 4 = 9", "8", 1, 0),
        ("#### 8\n#### 9", "8", 0, 1),
        ("12 apples, then 13", "12", 0, 0),
        ("no idea", "12", 0, 0),
        ("#### 1.2.3", "1.2", 1, 0),
        ("", "0", 0, 0),
    ],
)
def test_numbers(response: str, truth: str, right: int, form: int) -> None:
    assert answer("gsm8k", response, truth) == (right, form)


@pytest.mark.parametrize(
    ("response", "truth", "right", "form"),
    [
        ("So the answer is (B).", "B", 1, 1),
        ("Answer: C", "C", 1, 1),
        ("**Answer**: **D**", "D", 0, 0),
        ("The answer is **D**", "D", 1, 1),
        (r"\boxed{A}", "(a)", 1, 1),
        (r"\boxed{\text{B}}", "B", 1, 1),
        ("<answer> E </answer>", "E", 1, 1),
        ("The answer is A. No, the answer is B", "B", 1, 1),
        ("The answer is Apples", "A", 0, 0),
        ("I choose\nC", "C", 1, 0),
        ("C or D, hard to say", "C", 0, 0),
        ("", "A", 0, 0),
    ],
)
def test_choices(response: str, truth: str, right: int, form: int) -> None:
    assert answer("multiple_choice", response, truth) == (right, form)


@pytest.mark.parametrize(
    ("response", "truth", "right", "form"),
    [
        ("<think>2 + 2</think> <answer>4</answer>", "4", 1, 1),
        ("<think>a</think>\n<answer> New   York </answer>\n", "new york", 1, 1),
        ("<think>a</think><answer>5</answer>", "4", 0, 1),
        ("well <think>a</think><answer>4</answer>", "4", 1, 0),
        ("<answer>4</answer><think>a</think>", "4", 1, 0),
        ("<think>a</think><answer>3</answer><answer>4</answer>", "4", 1, 0),
        ("<think>a<answer>4", "4", 0, 0),
    ],
)
def test_tags(response: str, truth: str, right: int, form: int) -> None:
    assert answer("tagged", response, truth) == (right, form)
    score = load_function("recipes/rewards/tagged.py", "reward").call(("", response, truth, {}))[
        "score"
    ]
    assert score == right * form


def test_rules_are_found_from_any_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    user_function._import_file.cache_clear()
    assert answer("gsm8k", "#### 7", "7") == (1, 1)
    with pytest.raises(ValueError, match=r"reward.path=mine.py: no such file in .* or "):
        load_function("mine.py", "reward")
