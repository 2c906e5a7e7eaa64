"""Calls the user's reward function for many samples and returns its answers.

A sync function runs in this thread, an async one on an event loop with a deadline per sample. With
reward.workers, either runs in processes, which are killed at the deadline.

Finds reward files that set handlers of signals, which Python allows in main threads only.
"""

import ast
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
    find_file,
    reraise_interrupt,
    run_in_worker,
)
from mcore_rl.rewards.worker_pool import RewardWorkers

CALLS = ("alarm", "setitimer", "signal", "siginterrupt", "set_wakeup_fd")
"""Functions of the module `signal` that need the main thread, or whose handlers do."""


def refuse_signals(path: str, name: str, takes_all: bool) -> None:
    """Raise ValueError if a reward file uses signals: collectors call functions in other threads.

    path        reward.path, a file that was imported before
    takes_all   the function takes all samples at once, which workers do not do
    """
    tree = ast.parse(find_file("reward.path", path).read_bytes())
    found = _find_uses(tree)
    if not found:
        return
    line, use = found[0]
    remedy = "set reward.workers=1 or more, whose processes call it in their main thread"
    if takes_all:
        remedy = f"write {name} for one sample (docs/rewards.md), and {remedy}"
    raise ValueError(
        f"reward.path={path} line {line} uses {use}, which works in a main thread only, and with"
        f" reward.workers=0 (or run.debug=true) another thread calls {name}: {remedy}"
    )


def _find_uses(tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, name) of each use of CALLS, by line."""
    modules: set[str] = set()
    functions: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name for name in node.names if name.name == "signal"}
        if isinstance(node, ast.ImportFrom) and node.module == "signal":
            functions |= {name.asname or name.name for name in node.names if name.name in CALLS}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and node.attr in CALLS:
                found.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Name) and node.id in functions:
            found.append((node.lineno, node.id))
    return sorted(found)


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
