"""Runs tasks in worker processes; yields results as they finish, or raises the first error.

Workers are forks, made before this process has threads. They end with their parent, however it
ends. PeakMemory samples the memory that several processes take together.
"""

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from mcore_rl.process.disk import DiskFullError

SAMPLE_EVERY_S = 0.1


class PeakMemory:
    """Samples the memory of processes while it is entered; `peak_bytes` is the largest sum.

    The memory of a process is its proportional set size (Pss in smaps_rollup): all its pages,
    including those of libraries, each divided by the number of processes that share it. So the sum
    counts no page twice. It leaves out the page cache, which the system reclaims when it needs
    memory.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self._process_ids = process_ids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(
                self.peak_bytes, sum(map(measure_proportional, self._process_ids))
            )
            if self._stop.wait(SAMPLE_EVERY_S):
                return


def measure_proportional(process_id: int) -> int:
    """Return the proportional set size of a process, 0 if it has ended."""
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except (OSError, ValueError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


T = TypeVar("T")
R = TypeVar("R")
_POLL_S = 0.5


class Pool(Generic[T, R]):
    """Worker processes that carry out tasks.

    Each worker calls `make()` once to get its function. A single worker is this process itself.
    """

    def __init__(self, make: Callable[[], Callable[[T], R]], num_workers: int) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._own_function = make() if num_workers == 1 else None
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

    def run(
        self, tasks: Sequence[T], lane_of: Callable[[T], Hashable] = lambda _: None
    ) -> Iterator[tuple[T, R]]:
        """Yield (task, result) in the order of completion.

        lane_of   what a task blocks for others, such as a file; workers share a lane only when no
                  other is left
        Raises a worker's ValueError, OSError or DiskFullError as it is, and other errors as
        RuntimeError with the worker's traceback.
        """
        if self._own_function is not None:
            for task in tasks:
                yield task, self._own_function(task)
            return
        waiting = _Lanes(tasks, lane_of)
        busy: dict[Connection, tuple[BaseProcess, T]] = {}
        for process, connection in self._workers:
            _give_next(process, connection, waiting, busy)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                process, task = busy.pop(connection)
                result = _receive(process, connection, task)
                _give_next(process, connection, waiting, busy)
                yield task, result

    def close(self) -> None:
        """Kill the workers, even in the middle of a task."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(5.0)

    def __enter__(self) -> "Pool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lanes(Generic[T]):
    """The tasks that wait, by lane. A worker keeps to its lane until that is empty."""

    def __init__(self, tasks: Sequence[T], lane_of: Callable[[T], Hashable]) -> None:
        self._waiting: dict[Hashable, deque[T]] = defaultdict(deque)
        for task in tasks:
            self._waiting[lane_of(task)].append(task)
        self._lane_of_worker: dict[Connection, Hashable] = {}

    def take(self, worker: Connection) -> T | None:
        """Return the next task of the worker's lane, or of the lane with the fewest workers."""
        lane = self._lane_of_worker.pop(worker, None)
        if not self._waiting.get(lane):
            taken = Counter(self._lane_of_worker.values())
            left = [other for other, tasks in self._waiting.items() if tasks]
            if not left:
                return None
            lane = min(left, key=lambda other: taken[other])
        self._lane_of_worker[worker] = lane
        return self._waiting[lane].popleft()


def _give_next(
    process: BaseProcess,
    connection: Connection,
    waiting: "_Lanes[T]",
    busy: dict[Connection, tuple[BaseProcess, T]],
) -> None:
    """Send a worker the next task, if one is waiting, and enter the worker in `busy`."""
    task = waiting.take(connection)
    if task is not None:
        busy[connection] = (process, task)
        connection.send(task)


def _receive(process: BaseProcess, connection: Connection, task: object) -> Any:
    """Return a worker's result for `task`, or raise its error."""
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join(5.0)
        raise RuntimeError(
            f"a worker died (exit code {process.exitcode}) during {task!r:.200}"
        ) from None
    if kind == "error":
        raise value
    return value


def _worker(connection: Connection, make: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch = sys.modules.get("torch")
    if torch is not None:
        # A fork lacks the threads of its parent's torch and would wait for them forever.
        torch.set_num_threads(1)
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
