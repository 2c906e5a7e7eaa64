"""Scores answers to questions by exact match or F1, after normalizing both sides.

Search-R1 (verl/utils/reward_score/qa_em.py) and SQuAD normalize alike: lower case, no punctuation,
no articles, single spaces.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, with single spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(answer: str, truth: str) -> float:
    """Return 1 if the answer is the truth, else 0."""
    return float(normalize(answer) == normalize(truth))


def contains(answer: str, truth: str) -> float:
    """Return 1 if the truth stands somewhere in the answer, else 0."""
    return float(normalize(truth) in normalize(answer))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of the words' precision and recall, from 0 to 1."""
    said = Counter(normalize(answer).split())
    wanted = Counter(normalize(truth).split())
    num_shared = (said & wanted).total()
    if not num_shared:
        return float(said == wanted)
    return 2 * num_shared / (said.total() + wanted.total())


SCORES: Mapping[str, Callable[[str, str], float]] = {
    "em": exact_match,
    "f1": f1,
    "contains": contains,
}


def best_score(score: str, answer: str, ground_truth: Any) -> float:
    """Return the score of an answer against the best of its truths; 0 if there is none.

    `ground_truth` is a text, a list of them, or {"target": either}, as Search-R1's files have it.
    """
    return max((SCORES[score](answer, truth) for truth in truths_of(ground_truth)), default=0.0)


def truths_of(ground_truth: Any) -> list[str]:
    """Return the right answers of a task."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if ground_truth is None:
        return []
    if isinstance(ground_truth, str | int | float):
        return [str(ground_truth)]
    return [str(truth) for truth in ground_truth]
