"""Rewards of problems whose answer is one number (GSM8K): the number, and its form.

score   1 if the response's final number is the answer; it is the number after the last "####", or
        the last number of all
right   the same number, for reward.parts
form    1 if the response ends in "#### <number>", as the data's instruction asks
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = r"-?\$?\s?\d[\d,]*(?:\.\d+)?"


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    marked = re.findall(rf"####\s*({NUMBER})", solution_str)
    numbers = marked or re.findall(NUMBER, solution_str)
    right = float(bool(numbers) and _value(numbers[-1]) == _value(ground_truth))
    form = float(re.search(rf"####\s*{NUMBER}\s*$", solution_str) is not None)
    return {"score": right, "right": right, "form": form}


def _value(text: str) -> Decimal | None:
    """Return the number without currency sign and thousands separators; 3 and 3.0 are equal."""
    try:
        return Decimal(re.sub(r"[$,\s]", "", text))
    except InvalidOperation:
        return None
