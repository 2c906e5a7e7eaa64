"""Rewards of MATH problems: whether math-verify finds answer and ground truth equal.

The answer is the last \\boxed{...} of the response, or without one the last formula or number.

score   1 if it is right
right   the same number, for reward.parts
form    1 if the response has a \\boxed{...}

A comparison of formulas can take very long. With reward.workers, reward.timeout_s limits it and
counts it as an error. In the controller it stops after SECONDS and counts as wrong.
"""

import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any

from math_verify import (
    ExprExtractionConfig,
    LatexExtractionConfig,
    StringExtractionConfig,
    parse,
    verify,
)

BOXED = "\\boxed{"
FORMULAS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
LETTERS = (StringExtractionConfig(),)
SECONDS = 5
logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns of every comparison without a timeout


def reward(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    truth = str(ground_truth).strip()
    kinds = [*FORMULAS, *(LETTERS if truth in "ABCDEF" else ())]
    seconds: Any = SECONDS if multiprocessing.parent_process() is None else None
    gold = parse(truth if BOXED in truth else f"${truth}$", kinds, parsing_timeout=seconds)
    gold = gold or parse(truth, kinds, parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} is no mathematics")
    boxed = solution_str.rfind(BOXED)
    answer = parse(solution_str[max(boxed, 0) :], kinds, parsing_timeout=seconds)
    right = float(bool(answer) and verify(gold, answer, timeout_seconds=seconds))
    return {"score": right, "right": right, "form": float(boxed >= 0)}
