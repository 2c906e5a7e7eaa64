"""Rewards of multiple-choice questions: the ground truth is a letter, A to J.

score   1 if the response's choice is the answer
right   the same number, for reward.parts
form    1 if the choice is marked as one (MEANT), not just a letter at the end
"""

import re
from collections.abc import Mapping
from typing import Any

LETTER = r"\(?\**([A-J])\**\)?(?![A-Za-z])"
MEANT = (
    rf"\\boxed\{{\s*(?:\\text\{{)?\s*{LETTER}",
    rf"<answer>\s*{LETTER}",
    rf"(?i:answer|choice|option)\s*(?i:is|:|=)\s*:?\s*{LETTER}",
)
"""Patterns that mark a choice, the most explicit first; of several matches the last counts."""


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    choice, form = _choice(solution_str)
    right = float(choice == ground_truth.strip().strip("()").upper())
    return {"score": right, "right": right, "form": form}


def _choice(text: str) -> tuple[str, float]:
    for pattern in MEANT:
        if found := re.findall(pattern, text):
            return found[-1], 1.0
    alone = re.findall(r"(?:^|\s)\(?([A-J])\)?[.)]?\s*$", text)
    return (alone[-1], 0.0) if alone else ("", 0.0)
