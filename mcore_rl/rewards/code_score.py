"""Scores many programs at once: finds each response's program and runs its tests in parallel."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_rl.rewards.code_execution import CaseLimits
from mcore_rl.rewards.code_tests import ProgramTests, read_tests
from mcore_rl.sandbox.run import SandboxError

_BLOCK = re.compile(r"```(?:python3?|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
T = TypeVar("T")
R = TypeVar("R")


def program_of(response: str) -> str | None:
    """Return the last fenced block of a response; None if it has none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else None


def score_of(results: Sequence[bool]) -> dict[str, float]:
    """Return the numbers of a program: the share of tests that it passes, and whether it is all."""
    share = sum(results) / len(results)
    return {"score": share, "passed": share, "solved": float(all(results))}


def score_responses(
    responses: Sequence[str], ground_truths: Sequence[Any], limits: CaseLimits | None = None
) -> list[dict[str, float] | Exception]:
    """Return the numbers of each response, or the error that cost them.

    A response without a program passes nothing. An error is a ground truth without tests, or a
    sandbox that did not start: it says nothing about the program, so there is no number.
    """

    def score(pair: tuple[str, Any]) -> dict[str, float] | Exception:
        response, ground_truth = pair
        try:
            tests = read_tests(ground_truth)
            return score_of(_results(program_of(response), tests, limits))
        except (ValueError, SandboxError) as error:
            return error

    return in_parallel(score, list(zip(responses, ground_truths, strict=True)))


def in_parallel(function: Callable[[T], R], entries: Sequence[T]) -> list[R]:
    """Return what `function` returns for each entry, in order; a thread for each core calls it."""
    if not entries:
        return []
    num_threads = min(len(os.sched_getaffinity(0)), len(entries))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="code_reward") as pool:
        return list(pool.map(function, entries))


def _results(program: str | None, tests: ProgramTests, limits: CaseLimits | None) -> list[bool]:
    return [False] * len(tests) if program is None else tests.results(program, limits)
