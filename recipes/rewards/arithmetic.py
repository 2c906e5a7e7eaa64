"""Reward of arithmetic word problems: 1 if the response's last number is the answer, else 0."""

import re
from collections.abc import Mapping
from typing import Any


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    numbers = re.findall(r"-?\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
