"""Rewards of programs and of unit tests for them, by CURE (mcore_rl/rewards/cure.py).

program  share of ground-truth tests that a program passes; 0 for a unit test
test     how well a unit test tells right programs from wrong ones, -1 to 1; 0 for a program
is_test  which of the two a sample is, for algorithm.role_part

`reward` is for Python programs; `reward_counted` counts wrong programs, as the paper's formula
does, instead of taking their share; `reward_steps` is for the language of `mcore-rl data code`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.rewards.cure import rate_tests
from mcore_rl.rewards.cure_score import execute_python, execute_steps, score_samples


def reward(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[dict[str, float] | Exception]:
    return score_samples(solution_strs, ground_truths, extra_infos, execute_python)


def reward_counted(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[dict[str, float] | Exception]:
    return score_samples(solution_strs, ground_truths, extra_infos, execute_python, rate_tests)


def reward_steps(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
) -> list[dict[str, float] | Exception]:
    return score_samples(solution_strs, ground_truths, extra_infos, execute_steps)
