"""A teacher: samples in, the log-probs that another model gives their response tokens out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.rollout.client import RolloutError
from mcore_rl.rollout.scoring import UnreachableError, score_tokens
from mcore_rl.rollout.served_endpoint import ServedEndpoint
from mcore_rl.types import Sample

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Between two tries of a request."""


class Teacher:
    """Spreads samples over the teacher's engines; what one does not answer is asked again, of another if any.

    Raises RolloutError for a sample that nobody scored within the teacher's request_timeout_s.
    """

    def __init__(self, served: ServedEndpoint, watched: Callable[[Awaitable[Any]], Any]) -> None:
        """`watched` runs a coroutine to its end while ranks and engines are watched."""
        self._served, self._watched = served, watched

    def __call__(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Of each sample, one number per response token, at temperature 1."""
        return self._watched(self._score(samples))

    async def _score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        slots = asyncio.Semaphore(self._served.config.max_concurrency * len(self._served.engines))
        async with open_session(
            None, self._served.headers
        ) as http:  # _in_time has a limit for all tries
            try:
                async with asyncio.TaskGroup() as tasks:
                    started = [
                        tasks.create_task(self._in_time(http, slots, i, s))
                        for i, s in enumerate(samples)
                    ]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in started]

    async def _in_time(
        self, http: aiohttp.ClientSession, slots: asyncio.Semaphore, index: int, sample: Sample
    ) -> tuple[float, ...]:
        if not sample.response_ids:
            return ()
        seconds, failures = self._served.config.request_timeout_s, ["none of its engines serves"]
        async with slots:
            try:
                async with asyncio.timeout(seconds):
                    return await self._try(http, index, sample, failures)
            except TimeoutError:
                raise RolloutError(
                    f"the {self._served.role} did not score sample {sample.sample_index} of prompt"
                    f" {sample.prompt.index} in {seconds:g} s ({self._served.role}.request_timeout_s); last:"
                    f" {failures[-1]}"
                ) from None

    async def _try(
        self, http: aiohttp.ClientSession, index: int, sample: Sample, failures: list[str]
    ) -> tuple[float, ...]:
        """Engine after engine, until one answers; why they did not is added to `failures`."""
        before = len(sample.prompt.token_ids)
        tokens = (*sample.prompt.token_ids, *sample.response_ids)
        while True:
            if serving := self._served.health.serving:
                url = serving[(index + len(failures)) % len(serving)]
                try:
                    return tuple(await score_tokens(http, url, tokens, before - 1))
                except UnreachableError as error:
                    failures.append(str(error))
                    _log.warning("%s: %s; trying again", self._served.role, error)
            await asyncio.sleep(_PAUSE_S)


class Vocabulary(Protocol):
    """What is used of a HuggingFace tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def check_same_vocabulary(
    ours: Vocabulary, theirs: Vocabulary, model_path: str, teacher_path: str
) -> None:
    """ValueError unless every token has the same id in both: a teacher is asked about token ids."""
    here, there = ours.get_vocab(), theirs.get_vocab()
    differ = sorted(token for token in {**here, **there} if here.get(token) != there.get(token))
    if differ:
        first = differ[0]
        raise ValueError(
            f"teacher.path={teacher_path}: {len(differ)} tokens have other ids than in"
            f" model.path={model_path}, such as {first!r}: {_id(there, first)} in place of"
            f" {_id(here, first)}; the teacher scores token ids, so it must have the policy's vocabulary"
        )


def _id(vocabulary: Mapping[str, int], token: str) -> object:
    return vocabulary.get(token, "none")
