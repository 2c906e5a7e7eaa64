"""Rewards of responses in the form <think>...</think> <answer>...</answer>.

score   1 if the form is kept and the text of the answer is the ground truth, spaces and case aside
right   1 if the text between the last <answer> tags is the ground truth, whatever the form
form    1 if each tag occurs once, in order, with nothing before or after
"""

import re
from collections.abc import Mapping
from typing import Any

FORM = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    once = all(solution_str.count(tag) == 1 for tag in TAGS)
    form = float(once and FORM.fullmatch(solution_str) is not None)
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    right = float(bool(answers) and _plain(answers[-1]) == _plain(ground_truth))
    return {"score": form * right, "right": right, "form": form}


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
