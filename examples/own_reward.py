"""A reward of your own: full marks for the right number, part of them for a near one.

    mcore-rl data arithmetic --out data/arithmetic
    mcore-rl sft recipe=tiny_moe_grpo model.init=random run.dir=runs/sft
    mcore-rl train recipe=tiny_moe_grpo model.path=runs/sft/hf run.dir=runs/own_reward \
        reward.path=examples/own_reward.py reward.name=score_closeness

The function has verl's signature. `reward.workers` runs it in processes of its own, `async def`
lets many wait at once (docs/rewards.md).
"""

import re
from collections.abc import Mapping
from typing import Any


def score_closeness(
    *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """Return 1 for the right answer, at most 0.5 for a wrong one, 0 without a number."""
    numbers = re.findall(r"-?\d+", solution_str)
    if not numbers:
        return 0.0
    distance = abs(int(numbers[-1]) - int(ground_truth))
    return 1.0 if distance == 0 else 0.5 / (1 + distance)
