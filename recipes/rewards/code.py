"""Rewards of programs: the share of tests that the response's program passes in a sandbox.

The program is the response's last fenced block in the ground truth's language, else in Python.
mcore_rl/rewards/code/tests.py describes the ground truth, docs/code.md the guards against programs
that cheat.

score    share of tests passed
passed   the same number, for reward.parts
solved   1 if all tests pass

`reward` scores all samples of a call, a sandbox for each core; `reward_one` is for reward.workers.
Both take from reward.kwargs:

sandbox_url   a server that runs the programs; empty: the run's, or else they run where the reward
              is computed
wall_s        seconds of a program for each test
memory_mib    memory of a program
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.rewards.code.execution import CaseSettings
from mcore_rl.rewards.code.score import score_responses


def reward(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    sandbox_url: str = "",
    wall_s: float = 6.0,
    memory_mib: int = 1024,
) -> list[dict[str, float] | Exception]:
    settings = CaseSettings(wall_s=wall_s, memory_mib=memory_mib, sandbox_url=sandbox_url)
    return score_responses(solution_strs, ground_truths, settings)


def reward_one(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    sandbox_url: str = "",
    wall_s: float = 6.0,
    memory_mib: int = 1024,
) -> dict[str, float]:
    settings = CaseSettings(wall_s=wall_s, memory_mib=memory_mib, sandbox_url=sandbox_url)
    [answer] = score_responses([solution_str], [ground_truth], settings)
    if isinstance(answer, Exception):
        raise answer
    return answer
