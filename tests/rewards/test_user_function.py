"""Reward files that cannot be imported, and results as numbers by name."""

from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.rewards.user_function import describe_failure, load_function, numbers_of


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nimport sys\nsys.exit(0)\n", r"failed at line 3: SystemExit: .* with status 0$"),
        ("1 / 0\n", r"failed at line 1: ZeroDivisionError: division by zero$"),
        ("def (:\n", r"failed: SyntaxError"),
        ("import no_such_module\n", r"failed at line 1: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(
    source: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=rf"reward.path={path}: importing it {message}"):
        load_function(str(path), "reward")


def test_a_recipe_gives_further_arguments(tmp_path: Path) -> None:
    path = tmp_path / "scaled.py"
    path.write_text(
        "def f(*, data_source, solution_str, ground_truth, extra_info, scale=1.0):\n"
        "    return scale * len(solution_str)\n"
        "def all_of(*, data_sources, solution_strs, ground_truths, extra_infos, scale):\n"
        "    return [scale * len(text) for text in solution_strs]\n"
        "async def later(*, data_source, solution_str, ground_truth, extra_info, scale):\n"
        "    return scale * len(solution_str)\n"
    )
    fields = ("unit", "four", "", {})
    assert load_function(str(path), "f").call(fields) == 4.0
    for name in ("f", "all_of", "later"):
        assert load_function(str(path), name, {"scale": 3.0}).call(fields) == 12.0
    with pytest.raises(ValueError, match=r"those of reward\.kwargs: other; it takes .*scale"):
        load_function(str(path), "f", {"other": 1})


def test_results_become_numbers_by_name() -> None:
    assert numbers_of(True) == {"score": 1.0}
    assert numbers_of({"a": 2, "note": "text", 7: 0.5}) == {"a": 2.0, "7": 0.5}
    assert numbers_of({"\ud83d": 1}) == {"\\ud83d": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.0, True, Decimal("1"), Fraction(2, 2)),
        *(np.bool_(True), np.int8(1), np.float16(1), np.array(1.0), np.array([1])),
        *(torch.tensor(1.0), torch.tensor([1]), torch.tensor(True), torch.tensor(1.0).bfloat16()),
    ],
    ids=lambda value: f"{type(value).__name__}-{value!r:.20}",
)
def test_every_kind_of_number_counts_alone_and_by_name(value: object) -> None:
    assert numbers_of(value) == {"score": 1.0}
    assert numbers_of({"score": value, "part": value}) == {"score": 1.0, "part": 1.0}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.array([1.0, 2.0]), r"numpy\.ndarray of shape \(2,\)"),
        (torch.ones(2), r"torch\.Tensor of shape \(2,\)"),
        (np.array("yes"), r"numpy\.ndarray of shape \(\)"),
        (1j, "complex"),
        (10**400, "int"),
    ],
)
def test_what_is_no_single_number_is_named_with_its_key(value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"the reward is no number but {kind}: "):
        numbers_of(value)
    with pytest.raises(TypeError, match=f"the reward's 'part' is no number but {kind}: "):
        numbers_of({"score": 1.0, "part": value})


@pytest.mark.parametrize(
    ("value", "kind"),
    [("1.0", "str"), (b"1", "bytes"), (None, "NoneType"), ([1.0], "list"), (print, "builtin_")],
)
def test_notes_are_left_out_but_are_no_score(value: object, kind: str) -> None:
    assert numbers_of({"score": 1.0, "note": value}) == {"score": 1.0}
    with pytest.raises(TypeError, match=f"the reward is no number but {kind}"):
        numbers_of(value)
    with pytest.raises(TypeError, match=f"the reward's 'score' is no number but {kind}"):
        numbers_of({"score": value})


def test_an_error_is_named_with_its_text() -> None:
    assert describe_failure(ValueError("no")) == "ValueError: no"
    assert describe_failure(SystemExit(2)).endswith("with status 2")
