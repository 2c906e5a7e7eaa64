"""One function over many tasks in several processes; results as they come, or the first error.

Workers are forks, made before this process has threads. They end with their parent, however it ends.
"""

import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from mcore_rl.process.disk import DiskFullError

T = TypeVar("T")
R = TypeVar("R")
_POLL_S = 0.5


class Pool(Generic[T, R]):
    """`make()` is called once in each worker and gives the function. With one worker, in this process."""

    def __init__(self, make: Callable[[], Callable[[T], R]], num_workers: int) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._here = make() if num_workers == 1 else None
        context = mp.get_context("fork")
        for _ in range(num_workers if num_workers > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, make, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @property
    def process_ids(self) -> list[int]:
        return [os.getpid(), *(process.pid for process, _ in self._workers if process.pid)]

    def run(self, tasks: Sequence[T]) -> Iterator[tuple[T, R]]:
        """(task, result) in the order of completion. ValueError or OSError of a worker as it is, other errors
        as RuntimeError with the worker's traceback.
        """
        if self._here is not None:
            yield from ((task, self._here(task)) for task in tasks)
            return
        waiting = list(reversed(tasks))
        busy: dict[Connection, tuple[BaseProcess, T]] = {}
        for process, connection in self._workers:
            _give(process, connection, waiting, busy)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                process, task = busy.pop(connection)
                result = _answer(process, connection, task)
                _give(process, connection, waiting, busy)
                yield task, result

    def close(self) -> None:
        """End the workers, also in the middle of a task."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()

    def __enter__(self) -> "Pool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _give(
    process: BaseProcess,
    connection: Connection,
    waiting: list[T],
    busy: dict[Connection, tuple[BaseProcess, T]],
) -> None:
    if waiting:
        task = waiting.pop()
        busy[connection] = process, task
        connection.send(task)


def _answer(process: BaseProcess, connection: Connection, task: object) -> Any:
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join(5.0)
        raise RuntimeError(
            f"a worker died (exit code {process.exitcode}) while it did {task!r:.200}"
        ) from None
    if kind == "error":
        raise value
    return value


def _worker(connection: Connection, make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(
            1
        )  # a fork has no thread of its parent's, for which torch would wait for ever
    function = make()
    while os.getppid() == parent:
        if not connection.poll(_POLL_S):
            continue
        try:
            task = connection.recv()
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            answer = "result", function(task)
        except (ValueError, OSError, DiskFullError) as error:
            answer = "error", error
        except Exception:
            answer = "error", RuntimeError(traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
