"""Rewards of Python programs: the share of tests that the response's program passes in a sandbox.

The program is the response's last fenced block. mcore_rl/rewards/code_tests.py describes the
ground truth, docs/code.md the guards against programs that cheat.

score    share of tests passed
passed   the same number, for reward.parts
solved   1 if all tests pass

`reward` scores all samples of a call, a sandbox for each core; `reward_one` is for reward.workers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.rewards.code_score import score_responses


def reward(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[dict[str, float] | Exception]:
    return score_responses(solution_strs, ground_truths)


def reward_one(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    [answer] = score_responses([solution_str], [ground_truth])
    if isinstance(answer, Exception):
        raise answer
    return answer
