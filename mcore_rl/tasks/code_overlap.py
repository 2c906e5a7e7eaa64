"""Finds held-out problems whose statement or tests occur among the problems of a training set."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.data.rows import Row, ground_truth_of, load_rows, mapping_of, messages_of

RUN_LEN = 13
"""Words in a row that two statements share; shorter statements are compared as a whole."""
SHARE = 0.5
"""Share of a problem's runs of words, or of its tests, from which on it occurs elsewhere."""


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
    name = mapping_of(row, "extra_info", where).get("name")
    return f"{where} ({name})" if name else where
