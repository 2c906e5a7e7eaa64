"""Answers are right, held-out pairs are new, and demonstrations have the planted habits."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.tasks.search_questions import (
    ATTRIBUTES,
    NUM_HELD_OUT,
    RELATIONS,
    Question,
    demonstrate,
    make_encyclopedia,
    prepare_search,
    split_questions,
    vocabulary,
)
from mcore_rl.tasks.tiny_models import make_word_tokenizer

BOOK = make_encyclopedia(3, num_people=40)


def test_an_answer_is_two_facts_away() -> None:
    person = BOOK.people[0]
    question = Question("town", "teacher", person)
    assert question.text == f"what is the town of the teacher of {person} ?"
    teacher = BOOK.facts["teacher", person]
    assert BOOK.answer(question) == BOOK.facts["town", teacher]
    assert BOOK.hops(question) == (("teacher", person), ("town", teacher))


def test_every_person_has_every_fact_in_a_passage_of_its_own() -> None:
    passages = BOOK.passages()
    assert len(passages) == len({row["id"] for row in passages}) == 40 * 7
    for relation in RELATIONS:
        others = {BOOK.facts[relation, person] for person in BOOK.people}
        assert others == set(BOOK.people)
        assert all(BOOK.facts[relation, person] != person for person in BOOK.people)
    names = [*BOOK.people, *(name for attribute in ATTRIBUTES for name in BOOK.values[attribute])]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_questions_share_no_pair_with_training(seed: int) -> None:
    train, held_out = split_questions(BOOK, random.Random(seed))
    pairs = [
        {(asked.person, BOOK.facts[asked.relation, asked.person]) for asked in questions}
        for questions in (train, held_out)
    ]
    assert len(train) + len(held_out) == 40 * 12 and held_out
    assert not pairs[0] & pairs[1]


def test_demonstrations_guess_skip_or_look_up() -> None:
    rng = random.Random(0)
    question = Question("town", "teacher", BOOK.people[5])
    kinds = {1: 0, 2: 0, 3: 0}
    for _ in range(2000):
        turns = demonstrate(BOOK, question, rng)
        kinds[len(turns)] += 1
        last = turns[-1][-1]["content"]
        if len(turns) == 2:
            assert last == f"<answer> {BOOK.facts['town', question.person]} </answer>"
        if len(turns) == 3:
            assert last == f"<answer> {BOOK.answer(question)} </answer>"
            assert turns[2][:4] == turns[1] and turns[1][:2] == turns[0]
    shares = {turns: count / 2000 for turns, count in kinds.items()}
    assert shares == pytest.approx({1: 0.35, 2: 0.4, 3: 0.25}, abs=0.04)


def test_no_word_is_unknown() -> None:
    tokenizer = make_word_tokenizer(vocabulary(BOOK))
    rng = random.Random(1)
    for _ in range(50):
        asked = Question(rng.choice(ATTRIBUTES), rng.choice(RELATIONS), rng.choice(BOOK.people))
        for turn in demonstrate(BOOK, asked, rng):
            ids = tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False)
            assert tokenizer.pad_token_id not in ids and len(ids) <= 64


def test_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        prepare_search(tmp_path / name, seed)
    texts = {name: (tmp_path / name / "corpus.jsonl").read_text() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"]
    rows = pq.read_table(tmp_path / "a" / "heldout.parquet").to_pylist()
    assert rows == pq.read_table(tmp_path / "b" / "heldout.parquet").to_pylist()
    assert len(rows) == NUM_HELD_OUT
    ids = {json.loads(line)["id"] for line in texts["a"].splitlines()}
    for row in rows:
        assert set(row["extra_info"]["passages"]) <= ids and row["ability"] == "search"
