"""Reward of countdown problems: 1 if right steps use each number once and reach the target, else 0.

The ground truth is "3 8 5 -> 10", a response "8 + 5 = 13 high ; 13 - 3 = 10 reached". A step is
right if both numbers are left to use, and its result and its last word are true.
"""

import re
from collections.abc import Mapping
from typing import Any

STEP = re.compile(r"(\d+) ([+-]) (\d+) = (\d+) (low|high|reached)")


def reward(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    given, _, reach = ground_truth.partition(" -> ")
    left = [int(number) for number in given.split()]
    target = int(reach)
    for step in solution_str.strip().split(" ; "):
        match = STEP.fullmatch(step)
        if match is None:
            return 0.0
        a, b, result = int(match[1]), int(match[3]), int(match[4])
        right = a + b if match[2] == "+" else a - b
        if result != right or match[5] != _compare(result, target):
            return 0.0
        for number in (a, b):
            if number not in left:
                return 0.0
            left.remove(number)
        left.append(result)
    return float(left == [target])


def _compare(number: int, target: int) -> str:
    if number == target:
        return "reached"
    return "low" if number < target else "high"
