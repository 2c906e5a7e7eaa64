"""Planted copies of statements and tests are found and named, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.rows import write_parquet
from mcore_rl.tasks.code import check_overlap, find_overlaps, prepare_code, runs_of

LONG = "Given a list of numbers read from standard input print the sum of all that are even and"


def row(statement: str, pairs: list[tuple[Any, Any]], name: str = "") -> dict[str, Any]:
    truth = {"inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}
    return {
        "prompt": [{"role": "user", "content": statement}],
        "reward_model": {"ground_truth": json.dumps(truth)},
        "extra_info": {"name": name},
    }


def found(train: list[dict], held_out: list[dict]) -> list[tuple[str, str, str]]:
    overlaps = find_overlaps(
        iter([(f"train {i}", r) for i, r in enumerate(train)]),
        iter([(f"held-out {i}", r) for i, r in enumerate(held_out)]),
    )
    return [(o.held_out, o.what, o.train) for o in overlaps]


def test_statements_in_other_letters_and_tests_in_other_order_are_found() -> None:
    train = [row("nothing alike", [("9", "9")]), row(f"{LONG} positive", [("1", "2"), ("3", "4")])]
    held_out = [
        row(f"{LONG.upper()}, POSITIVE!", [("7", "7")], "copied"),
        row("quite another statement", [("3\n", "4"), ("1", "2"), ("5", "6")]),
        row("new", [("1", "3"), ("3", "5")]),
    ]
    assert found(train, held_out) == [
        ("held-out 0 (copied)", "words", "train 1"),
        ("held-out 1", "tests", "train 1"),
    ]


def test_a_few_shared_words_or_tests_are_no_copy() -> None:
    train = [row(f"{LONG} positive", [("1", "2"), ("2", "3")])]
    other = "print the sum of all that are even and odd in the tree that is given by its edges"
    assert found(train, [row(other, [("1", "2"), ("8", "8"), ("9", "9")])]) == []


def test_short_statements_are_compared_as_a_whole() -> None:
    assert runs_of("Add b, at most 9") == {"add b at most 9"}
    assert found([row("add b , at most 9", [])], [row("add b , at most 8", [])]) == []


@pytest.mark.slow
def test_generated_problems_do_not_overlap_and_a_planted_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_code(tmp_path)
    train, held_out = (str(tmp_path / f"{name}.parquet") for name in ("train", "heldout"))
    check_overlap([train], [held_out])
    assert "0 of 256 held-out problems" in capsys.readouterr().out
    planted = str(tmp_path / "planted.parquet")
    write_parquet([row("a new one", [([1], 5), ([2], 9)], "stolen")], Path(planted))
    with pytest.raises(RuntimeError, match="1 held-out problems occur"):
        check_overlap([train, planted], [held_out, planted])
    assert f"{planted} row 0 (stolen): its tests occur in {planted}" in capsys.readouterr().out
