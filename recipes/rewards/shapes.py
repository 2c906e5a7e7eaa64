"""Reward of questions about pictures: 1 if the response ends with the right answer, else 0."""

from collections.abc import Mapping
from typing import Any


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    words = solution_str.split()
    return float(words[-2:] == ["so", ground_truth])
