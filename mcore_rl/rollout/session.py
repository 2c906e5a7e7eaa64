"""Requests to engines that share connections and bounds; see rollout/client.py."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.rollout.engine_room import KvAdmission
from mcore_rl.rollout.request import EngineAffinity, Request, Sampling
from mcore_rl.rollout.transport import EngineTransport
from mcore_rl.types import Prompt, Sample

if TYPE_CHECKING:
    from mcore_rl.rollout.client import RolloutClient

_HOLD_POLL_S = 0.02


class RolloutSession:
    """Requests that share connections and one bound; they can be held back while weights change."""

    def __init__(
        self,
        client: "RolloutClient",
        transport: EngineTransport,
        max_in_flight: int,
        on_done: Callable[[], None],
        admission: KvAdmission | None = None,
    ) -> None:
        self.transport = transport
        self.admission = admission
        self._client = client
        self._on_done = on_done
        self._slots = asyncio.Semaphore(max_in_flight)
        self._may_post = asyncio.Event()
        self._may_post.set()
        self._num_posted = 0
        self.num_open = 0
        """Samples begun and not done."""
        self.num_waiting = 0
        """Samples that wait for others to be complete before they begin."""
        self.num_cut_off = 0
        """Responses that `hold` aborted half-way, to be sampled again."""

    @property
    def is_held(self) -> bool:
        return not self._may_post.is_set()

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        """Return `num_samples` samples of each prompt, grouped by prompt in the order of `prompts`.

        Lost connections, timeouts and aborted requests are retried, on another engine if there is
        one. Raises RolloutError for a request that fails config.retries + 1 times, and then cancels
        the others.
        """
        works = []
        for prompt in prompts:
            affinity = EngineAffinity(num_samples)
            requests = (Request(prompt, index, affinity) for index in range(num_samples))
            works += [self.sample(request, sampling) for request in requests]
        return await self.gather(works)

    async def sample(self, request: Request, sampling: Sampling) -> Sample:
        """Return one sample, or one turn of an episode; see `generate`."""
        return await self._client.sample_one(self, request, sampling)

    async def gather(self, works: Sequence[Coroutine[Any, Any, Sample]]) -> list[Sample]:
        """Run coroutines that each make a sample; when one fails, cancel the others and raise."""
        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as task_group:
                for work in works:
                    self.num_open += 1
                    tasks.append(task_group.create_task(work))
                    tasks[-1].add_done_callback(self._note_done)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _note_done(self, task: asyncio.Task[Sample]) -> None:
        self.num_open -= 1
        self._on_done()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more request may be posted; the block posts it."""
        with self._waiting():
            await self._slots.acquire()
        try:
            with self._waiting():
                await self._until_admitted()
            self._num_posted += 1
            try:
                yield
            finally:
                self._num_posted -= 1
        finally:
            self._slots.release()
            self._client.balance(self)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def _until_admitted(self) -> None:
        if self.admission is not None:
            await self.admission.wait(self._may_post)
        while self.is_held:
            await self._may_post.wait()

    def note_picked(self, engine: EngineLoad, request: Request) -> None:
        """Count the tokens that a request takes of its engine's KV cache at once."""
        if self.admission is not None:
            begun_len = request.begun.response_len if request.begun else 0
            self.admission.take(engine, len(request.prompt.token_ids) + begun_len)

    async def hold(self, *, cut_off: bool) -> None:
        """Post nothing more, and return once no request is under way; `resume` ends it.

        `cut_off` aborts the requests under way instead of waiting for them. Each request has a
        deadline of its own, so this call ends.
        """
        self._may_post.clear()
        while self._num_posted:
            # In each round: a request that was on its way has reached its engine by now.
            if cut_off:
                await self._client.abort_all(self.transport)
            await asyncio.sleep(_HOLD_POLL_S)

    async def resume(self) -> None:
        self._may_post.set()
