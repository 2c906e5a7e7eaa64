"""Reward files that cannot be imported, and results as numbers by name."""

from pathlib import Path

import pytest

from mcore_rl.rewards.user_function import describe_error, load_function, numbers_of


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
    with pytest.raises(ValueError, match="could not convert"):
        numbers_of("good")


def test_an_error_is_named_with_its_text() -> None:
    assert describe_error(ValueError("no")) == "ValueError: no"
    assert describe_error(SystemExit(2)).endswith("with status 2")
