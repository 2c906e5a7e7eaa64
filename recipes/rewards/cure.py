"""Rewards of programs and of unit tests for them, by CURE (mcore_rl/rewards/code/cure.py).

program  share of ground-truth tests that a program passes; 0 for a unit test
test     how well a unit test tells right programs from wrong ones, -1 to 1; 0 for a program
is_test  which of the two a sample is, for algorithm.role_part

`reward` is for programs in fenced blocks; `reward_counted` counts wrong programs, as the paper's
formula does, instead of taking their share; `reward_steps` is for the language of `mcore-rl data
code`. All take from reward.kwargs `sandbox_url`, a server that runs the programs.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mcore_rl.rewards.code.cure import execute_pairs, execute_programs, rate_tests, score_samples
from mcore_rl.tasks.code_steps import STEPS


def reward(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    sandbox_url: str = "",
) -> list[dict[str, float] | Exception]:
    answers = solution_strs, ground_truths, extra_infos
    return score_samples(*answers, execute_programs, sandbox_url=sandbox_url)


def reward_counted(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    sandbox_url: str = "",
) -> list[dict[str, float] | Exception]:
    answers = solution_strs, ground_truths, extra_infos
    return score_samples(*answers, execute_programs, rate_tests, sandbox_url)


def reward_steps(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    sandbox_url: str = "",
) -> list[dict[str, float] | Exception]:
    answers = solution_strs, ground_truths, extra_infos
    return score_samples(*answers, partial(execute_pairs, STEPS), sandbox_url=sandbox_url)
