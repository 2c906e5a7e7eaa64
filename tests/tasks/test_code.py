"""Problems have right tests, held-out ones are new, and demonstrations have the planted habit."""

import json
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.tasks import code
from mcore_rl.tasks.code import (
    TEST_TEXT,
    demonstrate,
    demonstrate_roles,
    prepare_code,
    problem_row,
    value_of_program,
    vocabulary,
)
from mcore_rl.tasks.code_steps import make_task
from mcore_rl.tasks.tiny_models import make_word_tokenizer


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    prepare_code(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_three_difficulties_and_no_held_out_problem_among_the_others(prepared: Path) -> None:
    questions = {
        name: {row["prompt"][0]["content"] for row in rows(prepared, name)}
        for name in ("train", "heldout")
    }
    shown = {row["messages"][0]["content"] for row in rows(prepared, "sft")}
    shown |= {
        row["messages"][0]["content"].removeprefix(TEST_TEXT) for row in rows(prepared, "sft_roles")
    }
    assert len(questions["heldout"]) == 256 and len(questions["train"]) == 4030
    assert not questions["heldout"] & (questions["train"] | shown)
    for name in ("train", "heldout"):
        assert {row["extra_info"]["difficulty"] for row in rows(prepared, name)} == {1, 2, 3}


def test_the_seed_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_HELD_OUT", "NUM_TRAIN", "NUM_DEMONSTRATED"):
        monkeypatch.setattr(code, name, {1: 5, 2: 20, 3: 20})
    found = []
    for seed in (0, 0, 1):
        prepare_code(tmp_path, seed)
        found.append(rows(tmp_path, "train"))
    assert found[0] == found[1] != found[2]


def test_no_word_is_unknown(prepared: Path) -> None:
    tokenizer = make_word_tokenizer(vocabulary())
    for row in rows(prepared, "sft")[:300] + rows(prepared, "sft_roles")[:300]:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        assert tokenizer.pad_token_id not in ids


def test_hidden_tests_are_not_in_the_prompt_and_are_right() -> None:
    rng = random.Random(0)
    for _ in range(50):
        task = make_task(rng, 2)
        row = problem_row(task, "train", 0, rng)
        truth = json.loads(row["reward_model"]["ground_truth"])
        assert row["prompt"] == [{"role": "user", "content": task.statement}]
        cases = truth["inputs"] + truth["public"]["inputs"]
        assert len({tuple(case) for case in cases}) == 8
        values = truth["outputs"] + truth["public"]["outputs"]
        assert values == [task.value(*case) for case in cases]


def test_demonstrations_mix_up_what_is_easily_mixed_up() -> None:
    rng = random.Random(0)
    tricky = [t for t in (make_task(rng, 1) for _ in range(6000)) if t.steps[0][0].mistake]
    shown = [demonstrate(task, rng) for task in tricky]
    wrong = sum(s[0][-1]["content"] != t.program for s, t in zip(shown, tricky, strict=True))
    assert wrong / len(tricky) == pytest.approx(0.65, abs=0.03)
    repairs = [turns[1] for turns in shown if len(turns) == 2]
    assert repairs and all(turns[2]["content"].startswith("wrong : a = ") for turns in repairs)


def test_unit_tests_work_out_each_step() -> None:
    rng = random.Random(3)
    num_tests = 0
    num_right = 0
    for _ in range(1000):
        task = make_task(rng, 2)
        for asked, test in demonstrate_roles(task, rng)[1:]:
            assert asked["content"] == f"{TEST_TEXT}{task.statement}"
            a, b, *values = map(int, re.findall(r"(-?\d+)", test["content"].replace("- ", "-")))
            assert len(values) == 2
            num_tests += 1
            num_right += values[-1] == task.value(a, b)
    assert num_tests > 1500 and 0.55 < num_right / num_tests < 0.9


def test_long_problems_have_no_unit_tests() -> None:
    rng = random.Random(3)
    assert len(demonstrate_roles(make_task(rng, 3), rng)) == 1


def test_a_program_that_divides_by_zero_has_no_value() -> None:
    assert value_of_program("a = a // b", 1, 0) is None
