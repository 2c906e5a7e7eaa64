"""Opens episodes of one environment in worker processes: as many workers as are needed."""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mcore_rl.agents.environments.environment import (
    EpisodeError,
    Message,
    ProgramResult,
    Start,
    Step,
)
from mcore_rl.agents.environments.worker_process import (
    EnvironmentOptions,
    WorkerProcess,
    make_import_folder,
)
from mcore_rl.agents.messages import EpisodeTask
from mcore_rl.process.folders import TempDir

_RUN_GRACE_S = 30.0
"""A worker ends a program, and the scoring of what the program left, in time by itself.

The pool waits this much longer, for the end of processes and for the reply.
"""

logger = logging.getLogger(__name__)


class EnvironmentPool:
    """Hosts the episodes of one environment. Use it on one event loop, as `async with`.

    Each error of an episode is an EpisodeError: EnvironmentLostError, EnvironmentFailedError or
    EnvironmentTimeoutError. It costs no other episode, unless a worker is lost with all of its own.
    """

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._folder = TempDir()
        make_import_folder(Path(self._folder.path))
        self._logs = Path(options.log_folder or self._folder.path)
        self._logs.mkdir(parents=True, exist_ok=True)
        self._workers: list[WorkerProcess] = []
        self._num_starting = 0
        self._names = itertools.count()
        self._worker_numbers = itertools.count()
        self._changed = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self, task: EpisodeTask | Mapping[str, Any]) -> "OpenEpisode":
        """Begin the episode of a task: wait for a place, then reset an environment to the task.

        Raises an EpisodeError, or ValueError if the task is not JSON.
        """
        fields = make_task_fields(task)
        worker, name = await self._take_place(describe_task(fields))
        episode = OpenEpisode(self, worker, name, fields, self._options)
        try:
            await episode.reset(fields)
        except BaseException:
            await episode.close()
            raise
        return episode

    async def run(self, task: EpisodeTask | Mapping[str, Any]) -> ProgramResult:
        """Have a program run the episode of a task; a canceled run ends the program.

        Raises an EpisodeError if the worker is lost or the adapter itself fails.
        """
        fields = make_task_fields(task)
        what = f"run of {describe_task(fields)}"
        worker, name = await self._take_place(what)
        deadline_s = self._options.run_timeout_s
        request = {"episode": name, "task": fields, "deadline_s": deadline_s}
        try:
            limit_s = deadline_s + worker.after_deadline_s + _RUN_GRACE_S
            value = await worker.call("run", what, limit_s, request)
        except asyncio.CancelledError:
            await worker.abandon(name)
            raise
        finally:
            self.release(worker, name)
        return ProgramResult(**value)

    async def close(self) -> None:
        """End all workers and their processes. Episodes that are still open are lost."""
        self._is_closed = True
        workers = list(self._workers)
        self._workers.clear()
        self._notify()
        await asyncio.gather(*(worker.stop() for worker in workers), *self._stopping)
        while self._num_starting:  # bounded by start_timeout_s; each stops itself
            await self._changed.wait()
        self._folder.remove()

    def release(self, worker: WorkerProcess, name: int) -> None:
        """Give back the place of an episode; end a worker that retires after its last one."""
        worker.episodes.discard(name)
        if worker.retires and not worker.episodes and worker in self._workers:
            self._workers.remove(worker)
            logger.warning("%s is replaced: an episode hangs in it", worker.name)
            stopping = asyncio.ensure_future(worker.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
        self._notify()

    def observe(self, worker: WorkerProcess, seconds: float) -> None:
        """Take how long an answer of a worker took."""
        before = worker.concurrency.limit
        if reason := worker.concurrency.observe(seconds):
            logger.warning("environment %s, %s: %s", self._options.kind, worker.name, reason)
        if worker.concurrency.limit > before:
            self._notify()

    async def _take_place(self, who: str) -> tuple[WorkerProcess, int]:
        """Return (worker, name of the episode in it), once a worker takes one more."""
        name = next(self._names)
        try:
            async with asyncio.timeout(self._options.place_timeout_s):
                while not self._is_closed:
                    changed = self._changed
                    if worker := self._free_worker():
                        worker.episodes.add(name)
                        return worker, name
                    if len(self._workers) + self._num_starting < self._options.workers:
                        await self._start_worker()
                    else:
                        await changed.wait()
        except TimeoutError as error:
            raise EpisodeError(
                f"{who} of environment {self._options.kind} waited for a place in "
                f"{len(self._workers)} workers for more than {self._options.place_timeout_s:g} s "
                "(place_timeout_s): raise workers or episodes_per_worker"
            ) from error
        raise EpisodeError(f"{who}: the pool of environment {self._options.kind} is closed")

    def _free_worker(self) -> WorkerProcess | None:
        free = [
            worker
            for worker in self._workers
            if not worker.lost
            and not worker.retires
            and len(worker.episodes) < worker.concurrency.limit
        ]
        return min(
            free, key=lambda worker: len(worker.episodes) / worker.concurrency.limit, default=None
        )

    async def _start_worker(self) -> None:
        number = next(self._worker_numbers)
        worker = WorkerProcess(number, self._options, self._logs / f"worker_{number}.log")
        self._num_starting += 1
        try:
            await worker.start(Path(self._folder.path), lambda: self._forget(worker))
            if self._is_closed:
                await worker.stop()
            elif not worker.lost:
                self._workers.append(worker)
        finally:
            self._num_starting -= 1
            self._notify()

    def _forget(self, worker: WorkerProcess) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            logger.warning("environment %s, %s: %s", self._options.kind, worker.name, worker.lost)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class OpenEpisode:
    """An episode that was reset. `start` has its first messages."""

    def __init__(
        self,
        pool: EnvironmentPool,
        worker: WorkerProcess,
        name: int,
        task: Mapping[str, Any],
        options: EnvironmentOptions,
    ) -> None:
        self.start = Start([])
        self._pool = pool
        self._worker = worker
        self._name = name
        self._task = describe_task(task)
        self._options = options
        self._is_open = True

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Reset the environment; EnvironmentPool.open does it."""
        what = f"reset to {self._task}"
        self.start = Start(
            **await self._call("reset", what, self._options.reset_timeout_s, {"task": task})
        )

    async def step(self, message: Message) -> Step:
        """Give the policy's answer, return what follows. Raises an EpisodeError."""
        started_s = time.monotonic()
        value = await self._call(
            "step", f"step of {self._task}", self._options.step_timeout_s, {"message": message}
        )
        self._pool.observe(self._worker, time.monotonic() - started_s)
        return Step(**value)

    async def close(self) -> None:
        """Close the environment and give back its place. A failure is only logged."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if not self._worker.lost:
                await self._call("close", f"close of {self._task}", self._options.close_timeout_s)
        except EpisodeError as error:
            logger.warning("%s", error)
        finally:
            self._pool.release(self._worker, self._name)

    async def _call(
        self, verb: str, what: str, timeout_s: float, fields: Mapping[str, Any] | None = None
    ) -> Any:
        request = {"episode": self._name, **(fields or {})}
        try:
            return await self._worker.call(verb, what, timeout_s, request)
        except asyncio.CancelledError:
            await self._worker.abandon(self._name)
            raise


def make_task_fields(task: EpisodeTask | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a task by name, as an environment's reset takes them."""
    return dict(vars(task)) if isinstance(task, EpisodeTask) else dict(task)


def describe_task(task: Mapping[str, Any]) -> str:
    """Return the name of a task in errors: its place in the data set, and the sample."""
    source, index, sample = (task.get(k) for k in ("data_source", "index", "sample_index"))
    return f"task {index} of {source}, sample {sample}"
