"""Calls the user's reward function for many samples and returns its answers.

A sync function runs in this thread, an async one on an event loop with a deadline per sample. With
reward.workers, either runs in worker processes, which are killed at the deadline. A function that
sets handlers of signals needs workers, since Python allows handlers in main threads only.

A thread serves each worker over a pipe of its own, so that a worker that dies at any moment takes
no lock and no answer of another with it. Workers lead process groups, which end with them:
processes that a function starts do not outlive its worker.
"""

import ast
import asyncio
import inspect
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from mcore_rl.config import RewardConfig
from mcore_rl.process.errors import describe_error
from mcore_rl.process.process_state import wait_killed
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

START_S = 120.0
"""Deadline for a worker to start and import what it needs."""
POLL_S = 0.2
"""Longest time that the death of a worker stays unnoticed whose own processes live on."""
_spawn = multiprocessing.get_context("spawn")
_lock = threading.Lock()
"""Held to start and to reap: multiprocessing reaps all children whenever it starts one."""
CALLS = ("alarm", "setitimer", "signal", "siginterrupt", "set_wakeup_fd")
"""Functions of the module `signal` that need the main thread, or whose handlers do."""


class RewardWorkers:
    """Up to `num_workers` processes, started when needed. Call `close` at the end."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward_worker")
        self._own = threading.local()
        self._workers: set[_Worker] = set()
        self._workers_lock = threading.Lock()
        self._is_closed = False

    def call(
        self, function: Callable[..., Answer], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Answer]:
        """Return the answers of `function` to each tuple of arguments, in order.

        A call that takes longer than `timeout_s` seconds, ends its process or cannot be pickled is
        answered by the text of an error. Several threads may call.
        """
        futures = [self._threads.submit(self._call, function, args, timeout_s) for args in calls]
        answers: list[Answer] = []
        for future in futures:
            try:
                answers.append(future.result())
            except CancelledError:
                answers.append("RuntimeError: the reward's worker processes were ended")
        return answers

    def close(self) -> None:
        """Kill the workers, whatever they do."""
        with self._workers_lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _call(
        self, function: Callable[..., Answer], args: tuple[Any, ...], timeout_s: float
    ) -> Answer:
        try:
            return self._worker().call(function, args, timeout_s)
        except _LostWorkerError as error:
            self._discard()
            return str(error)
        except Exception as error:  # arguments that cannot be pickled, for example
            return describe_error(error)

    def _worker(self) -> "_Worker":
        """Return this thread's worker; start it if there is none."""
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._workers_lock:
                if self._is_closed:
                    raise RuntimeError("the reward's worker processes were ended")
                worker = self._own.worker = _Worker()
                self._workers.add(worker)
            worker.wait_until_ready()
        return worker

    def _discard(self) -> None:
        worker = self._own.worker
        self._own.worker = None
        worker.kill()
        with self._workers_lock:
            self._workers.discard(worker)


class _LostWorkerError(RuntimeError):
    """A worker that has to be replaced; its text is the answer to the call."""


class _Worker:
    def __init__(self) -> None:
        self._connection, theirs = _spawn.Pipe()
        # A daemon, so that an exit without `close` does not wait for it.
        self._process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        with _lock:
            self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        late = f"RuntimeError: a worker process did not start within {START_S:g} s"
        assert self._receive(START_S, late) is None

    def call(
        self, function: Callable[..., Answer], args: tuple[Any, ...], timeout_s: float
    ) -> Answer:
        try:
            self._connection.send((function, args))
        except (BrokenPipeError, ConnectionResetError):
            raise _LostWorkerError(self._how_it_ended()) from None
        late = f"TimeoutError: no answer within reward.timeout_s={timeout_s:g}"
        return self._receive(timeout_s, late)

    def kill(self) -> None:
        """Kill the worker and all processes of its group."""
        pid = self._process.pid
        assert pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()  # if it did not lead its group yet
        with _lock:
            wait_killed(self._process, "a reward's worker")

    def _receive(self, timeout_s: float, late: str) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            wait([self._connection, self._process.sentinel], min(left_s, POLL_S))
            with _lock:
                is_alive = self._process.is_alive()
            if self._connection.poll():
                try:
                    return self._connection.recv()
                except (EOFError, ConnectionResetError):
                    raise _LostWorkerError(self._how_it_ended()) from None
            if not is_alive:
                raise _LostWorkerError(self._how_it_ended())
            if time.monotonic() >= deadline_s:
                raise _LostWorkerError(late)

    def _how_it_ended(self) -> str:
        with _lock:
            self._process.join(START_S)
        status = self._process.exitcode
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return (
            f"RuntimeError: its process {how}: the reward function must"
            " return or raise, not end its process (os._exit, a crash in native code, memory)"
        )


def _serve(connection: Connection) -> None:
    """Answer calls until the pool is gone."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the controller's
    multiprocessing.current_process().daemon = False  # functions may start processes of their own
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send(None)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        except Exception as error:  # what cannot be unpickled
            connection.send(describe_error(error))
        else:
            connection.send(function(*args))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


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
            return self._call_in_processes(rows)
        function = self._function
        if function.is_async and not function.takes_all:
            return asyncio.run(self._settle([function.call_async(row) for row in rows]))
        with nullcontext() if function.is_async else self._lock:
            results = _call_in_this_thread(function, rows)
        if any(inspect.isawaitable(result) for result in results):
            return asyncio.run(self._settle(results))
        return [answer_of(lambda result=result: _raise_error(result)) for result in results]

    def close(self) -> None:
        """Kill the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    async def _settle(self, results: Sequence[Any]) -> list[Answer]:
        """Return the answers in some results; those that are awaitable are awaited together."""

        async def settle_one(result: Any) -> Answer:
            if not inspect.isawaitable(result):
                return answer_of(lambda: _raise_error(result))
            try:
                return await asyncio.wait_for(answer_of_async(result), self._config.timeout_s)
            except TimeoutError:
                return self._late_error()

        return await asyncio.gather(*map(settle_one, results))

    def _call_in_processes(self, rows: Sequence[Fields]) -> list[Answer]:
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


def _raise_error(result: object) -> object:
    """Raise a result that is an exception: of a call, or the answer for a sample that was lost."""
    if isinstance(result, BaseException):
        raise result
    return result
