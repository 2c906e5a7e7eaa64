"""A calculator as a tool, and the reward of an episode with it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SUM = re.compile(r"\s*\d+(\s*[-+]\s*\d+)*\s*")


def calculator(expression: str) -> str:
    """Compute a sum.

    expression: whole numbers with + and - between them
    """
    if not _SUM.fullmatch(expression):
        raise ValueError(f"{expression!r} is no sum of whole numbers")
    terms = re.findall(r"([-+]?)\s*(\d+)", expression)
    return str(sum(-int(number) if sign == "-" else int(number) for sign, number in terms))


def reward(conversation: Sequence[Mapping[str, Any]], task: Mapping[str, Any]) -> float:
    """Return 1 if the last answer ends with the right number, else 0."""
    numbers = re.findall(r"-?\d+", str(conversation[-1].get("content") or ""))
    return float(bool(numbers) and numbers[-1] == task["ground_truth"])
