"""Scores many programs at once: finds each response's program and runs its tests in parallel."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_rl.rewards.code.execution import CaseSettings
from mcore_rl.rewards.code.languages import program_of
from mcore_rl.rewards.code.places import server_of
from mcore_rl.rewards.code.tests import read_tests
from mcore_rl.services.sandbox.limits import SandboxError

WAITING_THREADS = 64
"""Programs that a call has at a server at a time, which bounds by itself how many run."""
T = TypeVar("T")
R = TypeVar("R")


def score_of(results: Sequence[bool]) -> dict[str, float]:
    """Return the numbers of a program: the share of tests that it passes, and whether it is all."""
    share = sum(results) / len(results)
    return {"score": share, "passed": share, "solved": float(all(results))}


def score_responses(
    responses: Sequence[str], ground_truths: Sequence[Any], settings: CaseSettings | None = None
) -> list[dict[str, float] | Exception]:
    """Return the numbers of each response, or the error that cost them.

    A response without a program passes nothing. An error is a ground truth without tests, or a
    sandbox that did not start: it says nothing about the program, so there is no number.
    """

    def score(pair: tuple[str, Any]) -> dict[str, float] | Exception:
        response, ground_truth = pair
        try:
            tests = read_tests(ground_truth)
            program = program_of(response, tests.languages)
            results = [False] * len(tests) if program is None else tests.results(program, settings)
            return score_of(results)
        except (ValueError, SandboxError) as error:
            return error

    pairs = list(zip(responses, ground_truths, strict=True))
    return run_in_parallel(score, pairs, "" if settings is None else settings.sandbox_url)


def run_in_parallel(
    function: Callable[[T], R], entries: Sequence[T], sandbox_url: str = ""
) -> list[R]:
    """Return what `function` returns for each entry, in order.

    A thread for each core calls it, or more that wait for a server.
    """
    if not entries:
        return []
    is_elsewhere = bool(server_of(sandbox_url))
    num_threads = WAITING_THREADS if is_elsewhere else len(os.sched_getaffinity(0))
    num_threads = min(num_threads, len(entries))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="code_reward") as pool:
        return list(pool.map(function, entries))
