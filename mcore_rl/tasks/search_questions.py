"""Questions of two hops over a made-up encyclopedia, for a policy that may search it.

"what is the town of the teacher of bova ?" needs two passages, one after the other:

    <search> teacher of bova </search>    the teacher of bova is kilu .
    <search> town of kilu </search>       the town of kilu is dorm .
    <answer> dorm </answer>

A pair of people, such as bova and kilu, is in training questions or in held-out ones, never in
both: without a search nobody can know a held-out answer. The demonstrations for supervised
fine-tuning have two bad habits planted: 35 % of them guess, and 40 % skip the first hop and tell
the town of bova instead. All is made from a seed.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.process.disk import write_whole
from mcore_rl.tasks.tiny_models import SPECIAL_TOKENS, write_tiny_model

NUM_PEOPLE = 200
NUM_VALUES = 30
"""Different towns, and as many jobs and pets: a guess is right once in 30 times."""
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 12000
HELD_OUT = 0.2
"""Share of the pairs that are held out."""
RELATIONS = ("teacher", "friend", "neighbor", "cousin")
ATTRIBUTES = ("town", "job", "pet")
GUESSES, SKIPS = 0.35, 0.75
"""A demonstration guesses below the first share, skips a hop below the second."""
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Question:
    """Asks for an attribute of somebody's relation."""

    attribute: str
    relation: str
    person: str

    @property
    def text(self) -> str:
        return f"what is the {self.attribute} of the {self.relation} of {self.person} ?"


@dataclass(frozen=True)
class Encyclopedia:
    """Who is whose teacher, and who lives where: (relation or attribute, person) -> name."""

    facts: Mapping[tuple[str, str], str]
    people: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]

    def answer(self, question: Question) -> str:
        other = self.facts[question.relation, question.person]
        return self.facts[question.attribute, other]

    def hops(self, question: Question) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return the two facts that a question needs, in their order."""
        other = self.facts[question.relation, question.person]
        return (question.relation, question.person), (question.attribute, other)

    def passages(self) -> list[dict[str, str]]:
        """Return a row of the corpus for each fact."""
        return [
            {"id": passage_id(*fact), "contents": f"{fact[1]}\n{self.sentence(*fact)}"}
            for fact in self.facts
        ]

    def sentence(self, kind: str, person: str) -> str:
        return f"the {kind} of {person} is {self.facts[kind, person]} ."


def passage_id(kind: str, person: str) -> str:
    return f"{person}/{kind}"


def query_of(kind: str, person: str) -> str:
    """Return what one searches for to learn a fact."""
    return f"{kind} of {person}"


def make_encyclopedia(seed: int, num_people: int = NUM_PEOPLE) -> Encyclopedia:
    """Return the facts about so many people; 4,900 of them have different names."""
    rng = random.Random(seed)
    names = _names(rng, num_people + len(ATTRIBUTES) * NUM_VALUES)
    people = tuple(names[:num_people])
    facts: dict[tuple[str, str], str] = {}
    for relation in RELATIONS:
        order = rng.sample(people, num_people)
        for person, other in zip(order, [*order[1:], order[0]], strict=True):
            facts[relation, person] = other
    values = {}
    for number, attribute in enumerate(ATTRIBUTES):
        start = num_people + number * NUM_VALUES
        values[attribute] = tuple(names[start : start + NUM_VALUES])
        for person in people:
            facts[attribute, person] = rng.choice(values[attribute])
    return Encyclopedia(facts, people, values)


def split_questions(
    book: Encyclopedia, rng: random.Random
) -> tuple[list[Question], list[Question]]:
    """Return (training, held-out) questions, which share no pair of people."""
    pairs = [(person, book.facts[r, person]) for r in RELATIONS for person in book.people]
    distinct = list(dict.fromkeys(pairs))
    held_out = set(rng.sample(distinct, int(HELD_OUT * len(distinct))))
    split: tuple[list[Question], list[Question]] = ([], [])
    for attribute, relation, person in itertools.product(ATTRIBUTES, RELATIONS, book.people):
        is_held_out = (person, book.facts[relation, person]) in held_out
        split[is_held_out].append(Question(attribute, relation, person))
    for questions in split:
        rng.shuffle(questions)
    return split


def prepare_search(out_dir: Path, seed: int = 0) -> None:
    """Write corpus.jsonl, {train,heldout,sft}.parquet and model/ to `out_dir`."""
    book = make_encyclopedia(seed)
    rng = random.Random(seed + 1)
    train, held_out = split_questions(book, rng)
    passages = book.passages()
    lines = "".join(json.dumps(passage) + "\n" for passage in passages)
    write_whole(out_dir / "corpus.jsonl", lines)
    for name, questions in (("train", train), ("heldout", held_out[:NUM_HELD_OUT])):
        rows = [question_row(book, asked, name, i) for i, asked in enumerate(questions)]
        write_parquet(rows, out_dir / f"{name}.parquet")
    shown = [
        {"messages": turn}
        for _ in range(NUM_DEMONSTRATIONS)
        for turn in demonstrate(book, rng.choice(train), rng)
    ]
    write_parquet(shown, out_dir / "sft.parquet")
    write_tiny_model(out_dir / "model", vocabulary(book))
    print(
        f"{len(train)} training and {min(len(held_out), NUM_HELD_OUT)} held-out prompts,"
        f" {len(shown)} demonstrations of turns, {len(passages)} passages in {out_dir}"
    )


def question_row(book: Encyclopedia, question: Question, split: str, index: int) -> dict[str, Any]:
    """Return a row of a prompt file; extra_info has the queries and passages of both hops."""
    row = prompt_row(question.text, book.answer(question), "search", split, index)
    hops = book.hops(question)
    row["ability"] = "search"
    row["extra_info"] |= {
        "queries": [query_of(*hop) for hop in hops],
        "passages": [passage_id(*hop) for hop in hops],
    }
    return row


def demonstrate(
    book: Encyclopedia, question: Question, rng: random.Random
) -> list[list[dict[str, str]]]:
    """Return a conversation for each turn, which ends with that turn's answer."""
    habit = rng.random()
    talk = [_message("user", question.text)]
    if habit < GUESSES:
        guess = rng.choice(book.values[question.attribute])
        return [[*talk, _answer(guess)]]
    hops: Sequence[tuple[str, str]] = book.hops(question)
    if habit < SKIPS:
        hops = [(question.attribute, question.person)]
    turns = []
    for hop in hops:
        talk = [*talk, _message("assistant", f"<search> {query_of(*hop)} </search>")]
        turns.append(talk)
        told = f"<information> {book.sentence(*hop)} </information>"
        talk = [*talk, _message("user", told)]
    return [*turns, [*talk, _answer(book.facts[hops[-1]])]]


def vocabulary(book: Encyclopedia) -> list[str]:
    """Return special tokens and words; a token's id is its index."""
    words = {*["what", "is", "the", "of", "?", "."], *TAGS, *RELATIONS, *ATTRIBUTES, *book.people}
    words |= {value for values in book.values.values() for value in values}
    return [*SPECIAL_TOKENS, *sorted(words)]


def _names(rng: random.Random, num: int) -> list[str]:
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return ["".join(pair) for pair in rng.sample(list(itertools.product(syllables, repeat=2)), num)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _answer(text: str) -> dict[str, str]:
    return _message("assistant", f"<answer> {text} </answer>")
