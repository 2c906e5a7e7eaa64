"""Lends warm workers to callers from several threads, starts them and replaces lost ones."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mcore_rl.services.sandbox.limits import SandboxError, SandboxFull
from mcore_rl.services.sandbox.worker import Worker


class WorkerPool:
    """At most `num_workers` workers, and at most `max_waiting` callers that wait for one.

    paths   folders and files of the machine that programs may read
    """

    def __init__(
        self,
        paths: Sequence[str],
        num_workers: int,
        max_waiting: int = 1 << 30,
        use_cgroups: bool = True,
        bubblewrap: bool = False,
    ) -> None:
        for name, value, least in (
            ("num_workers", num_workers, 1),
            ("max_waiting", max_waiting, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self._paths = paths
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._use_cgroups = use_cgroups
        self._bubblewrap = bubblewrap
        self._idle: list[Worker] = []
        self._num_lent = 0
        self._num_waiting = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def counts(self) -> dict[str, int]:
        """Return how many workers are idle and lent, and how many callers wait."""
        with self._changed:
            return {
                "idle": len(self._idle),
                "busy": self._num_lent,
                "waiting": self._num_waiting,
            }

    def has_cgroups(self) -> bool:
        """Return whether the idle workers have cgroups; False if there are none."""
        with self._changed:
            return bool(self._idle) and all(worker.cgroup is not None for worker in self._idle)

    def warm_up(self) -> None:
        """Start all workers; SandboxError if this machine allows no sandbox."""
        for _ in range(self._num_workers - len(self._idle) - self._num_lent):
            worker = self._start()
            with self._changed:
                self._idle.append(worker)

    @contextmanager
    def lend(self, timeout_s: float = 600.0) -> Iterator[Worker]:
        """Yield a worker for this caller alone; it is replaced if the block raises.

        Raises SandboxFull if the queue is full, and SandboxError if none becomes free in time.
        """
        worker = self._take(time.monotonic() + timeout_s, timeout_s)
        try:
            if worker is not None and not worker.is_alive:
                worker.close()
                worker = None
            if worker is None:
                worker = self._start()
            yield worker
        except BaseException:
            self._give_back(None)
            if worker is not None:
                worker.close()
            raise
        self._give_back(worker)

    def close(self) -> None:
        """End all workers that are not lent; those that are end when they come back."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.close()

    def _start(self) -> Worker:
        return Worker(self._paths, self._use_cgroups, self._bubblewrap)

    def _take(self, deadline: float, timeout_s: float) -> Worker | None:
        """Return an idle worker, or None if the caller may start one."""
        with self._changed:
            if self._is_busy() and self._num_waiting >= self._max_waiting:
                raise SandboxFull(
                    f"all {self._num_workers} workers of the sandbox are busy and"
                    f" {self._num_waiting} callers wait: try again later, or give it more workers"
                )
            self._num_waiting += 1
            try:
                while self._is_busy() and not self._is_closed:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise SandboxError(
                            f"waited {timeout_s:g} s for one of {self._num_workers} workers of the"
                            " sandbox to become free"
                        )
            finally:
                self._num_waiting -= 1
            if self._is_closed:
                raise SandboxError("the sandbox was closed")
            self._num_lent += 1
            return self._idle.pop() if self._idle else None

    def _is_busy(self) -> bool:
        return not self._idle and self._num_lent >= self._num_workers

    def _give_back(self, worker: Worker | None) -> None:
        with self._changed:
            self._num_lent -= 1
            is_kept = worker is not None and not (self._is_closed or worker.is_retired)
            if worker is not None and is_kept:
                self._idle.append(worker)
            self._changed.notify()
        if worker is not None and not is_kept:
            worker.close()
