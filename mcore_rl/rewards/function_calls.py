"""Calls the user's reward function for many samples and returns its answers.

A sync function runs in this thread, an async one on an event loop with a deadline per sample. With
reward.workers, either runs in processes, which are killed at the deadline.
"""

import asyncio
import inspect
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.user_function import (
    Answer,
    Fields,
    UserFunction,
    answer_of,
    answer_of_async,
    reraise_interrupt,
    run_in_worker,
)
from mcore_rl.rewards.user_signals import refuse_signals
from mcore_rl.rewards.worker_pool import RewardWorkers


class FunctionCalls:
    """Calls one function for many samples. `close` ends its worker processes."""

    def __init__(self, config: RewardConfig, function: UserFunction) -> None:
        """Raises ValueError if reward.workers is set for a function that takes all samples, or is
        not set for one that sets handlers of signals.
        """
        if config.workers and function.takes_all:
            raise ValueError(
                f"reward.workers={config.workers}: {config.path}:{config.name} takes all samples at"
                " once; use reward.workers=0"
            )
        if not config.workers:
            refuse_signals(config.path, config.name, function.takes_all)
        self._config = config
        self._function = function
        self._pool: RewardWorkers | None = None
        self._lock = threading.Lock()
        """Several threads may score samples, but a sync function is called by one at a time."""

    def __call__(self, rows: Sequence[Fields]) -> list[Answer]:
        """Return one answer per row, in order. No error of the function passes through."""
        if self._config.workers:
            return self._in_processes(rows)
        function = self._function
        if function.is_async and not function.takes_all:
            return asyncio.run(self._settle([function.call_async(row) for row in rows]))
        with nullcontext() if function.is_async else self._lock:
            results = _call_in_this_thread(function, rows)
        if any(inspect.isawaitable(result) for result in results):
            return asyncio.run(self._settle(results))
        return [answer_of(lambda result=result: _raised(result)) for result in results]

    def close(self) -> None:
        """Kill the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def _settle(self, results: Sequence[Any]) -> list[Answer]:
        """Return the answers in some results; those that are awaitable are awaited together."""

        async def settle_one(result: Any) -> Answer:
            if not inspect.isawaitable(result):
                return answer_of(lambda: _raised(result))
            try:
                return await asyncio.wait_for(answer_of_async(result), self._config.timeout_s)
            except TimeoutError:
                return self._late_error()

        return await asyncio.gather(*map(settle_one, results))

    def _in_processes(self, rows: Sequence[Fields]) -> list[Answer]:
        """A worker that takes too long is killed and replaced."""
        config = self._config
        with self._lock:
            if self._pool is None:
                self._pool = RewardWorkers(config.workers)
            pool = self._pool
        calls = [(config.path, config.name, config.kwargs, row) for row in rows]
        return pool.call(run_in_worker, calls, config.timeout_s)

    def _late_error(self) -> str:
        return f"TimeoutError: no answer within reward.timeout_s={self._config.timeout_s:g}"


def _call_in_this_thread(function: UserFunction, rows: Sequence[Fields]) -> list[Any]:
    """Return what a function returns for each sample: a result, an awaitable or an exception."""
    if function.takes_all:
        try:
            return list(function.call_all(rows))
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            reraise_interrupt(error)
            return [error] * len(rows)
    results: list[Any] = []
    for row in rows:
        try:
            results.append(function.begin(row))
        except BaseException as error:
            reraise_interrupt(error)
            results.append(error)
    return results


def _raised(result: object) -> object:
    """Raise a result that is an exception: of a call, or the answer for a sample that was lost."""
    if isinstance(result, BaseException):
        raise result
    return result
