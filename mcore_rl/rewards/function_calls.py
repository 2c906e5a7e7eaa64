"""Calls the user's reward function for many samples and returns its answers.

A sync function runs in this thread, an async one on an event loop with a deadline per sample. With
reward.workers, either runs in processes, which are killed at the deadline.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext

from pebble import ProcessExpired, ProcessPool

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.user_function import (
    Answer,
    Fields,
    UserFunction,
    answer_of,
    answer_of_async,
    describe_error,
    reraise_interrupt,
    run_in_worker,
)


class FunctionCalls:
    """Calls one function for many samples. `close` ends its worker processes."""

    def __init__(self, config: RewardConfig, function: UserFunction) -> None:
        """Raises ValueError if reward.workers is set for a function that takes all samples."""
        if config.workers and function.takes_all:
            raise ValueError(
                f"reward.workers={config.workers}: {config.path}:{config.name} takes all samples at"
                " once; use reward.workers=0"
            )
        self._config = config
        self._function = function
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()
        """Several threads may score samples, but a sync function is called by one at a time."""

    def __call__(self, rows: Sequence[Fields]) -> list[Answer]:
        """Return one answer per row, in order. No error of the function passes through."""
        if self._config.workers:
            return self._in_processes(rows)
        if self._function.is_async and not self._function.takes_all:
            return asyncio.run(self._concurrently(rows))
        with nullcontext() if self._function.is_async else self._lock:
            return _in_this_thread(self._function, rows)

    def close(self) -> None:
        """Kill the worker processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    async def _concurrently(self, rows: Sequence[Fields]) -> list[Answer]:
        async def answer_one(row: Fields) -> Answer:
            answer = answer_of_async(self._function, row)
            try:
                return await asyncio.wait_for(answer, self._config.timeout_s)
            except TimeoutError:
                return self._late_error()

        return await asyncio.gather(*map(answer_one, rows))

    def _in_processes(self, rows: Sequence[Fields]) -> list[Answer]:
        """A worker that takes too long is killed and replaced."""
        config = self._config
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPool(max_workers=config.workers, context=context)
            pool = self._pool
        futures = [
            pool.schedule(
                run_in_worker,
                args=(config.path, config.name, config.kwargs, row),
                timeout=config.timeout_s,
            )
            for row in rows
        ]
        answers: list[Answer] = []
        for future in futures:
            try:
                answers.append(future.result())
            except FutureTimeout:
                answers.append(self._late_error())
            except ProcessExpired as error:
                answers.append(f"RuntimeError: its process ended with status {error.exitcode}")
            except Exception as error:  # arguments that cannot be pickled, for example
                answers.append(describe_error(error))
        return answers

    def _late_error(self) -> str:
        return f"TimeoutError: no answer within reward.timeout_s={self._config.timeout_s:g}"


def _in_this_thread(function: UserFunction, rows: Sequence[Fields]) -> list[Answer]:
    if not function.takes_all:
        return [answer_of(lambda row=row: function.call(row)) for row in rows]
    try:
        results = list(function.call_all(rows))
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        reraise_interrupt(error)
        return [describe_error(error)] * len(rows)
    return [answer_of(lambda result=result: _raised(result)) for result in results]


def _raised(result: object) -> object:
    """Raise a result that is an exception: the function's answer for a sample that it lost."""
    if isinstance(result, Exception):
        raise result
    return result
