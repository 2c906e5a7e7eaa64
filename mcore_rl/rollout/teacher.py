"""Asks a teacher, another model, for its log-probs of the samples' response tokens."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.rollout.scoring import UnreachableError, score_tokens
from mcore_rl.rollout.served_endpoint import ServedEndpoint
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import Sample

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Time between two tries of a request."""


class Teacher:
    """Spreads samples over the teacher's engines; failed requests are retried on the next one.

    Raises RolloutError for a sample that no engine scored within the teacher's request_timeout_s.
    """

    def __init__(
        self, endpoint: ServedEndpoint, watched: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        """`watched` runs a coroutine to its end while ranks and engines are watched."""
        self._endpoint = endpoint
        self._watched = watched
        self._throttle = LogThrottle()

    def __call__(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return, for each sample, the log-prob of each response token at temperature 1."""
        return self._watched(self._score(samples))

    async def _score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        endpoint = self._endpoint
        slots = asyncio.Semaphore(endpoint.config.max_concurrency * len(endpoint.engines))
        # No timeout here: _score_in_time limits all tries of a sample together.
        async with open_session(None, endpoint.headers) as http:
            try:
                async with asyncio.TaskGroup() as task_group:
                    tasks = [
                        task_group.create_task(self._score_in_time(http, slots, index, sample))
                        for index, sample in enumerate(samples)
                    ]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score_in_time(
        self, http: aiohttp.ClientSession, slots: asyncio.Semaphore, index: int, sample: Sample
    ) -> tuple[float, ...]:
        if not sample.response_ids:
            return ()
        role = self._endpoint.role
        timeout_s = self._endpoint.config.request_timeout_s
        failures = ["none of its engines serves"]
        async with slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._score_one(http, index, sample, failures)
            except TimeoutError:
                raise RolloutError(
                    f"the {role} did not score sample {sample.sample_index} of prompt"
                    f" {sample.prompt.index} in {timeout_s:g} s ({role}.request_timeout_s);"
                    f" last: {failures[-1]}"
                ) from None

    async def _score_one(
        self, http: aiohttp.ClientSession, index: int, sample: Sample, failures: list[str]
    ) -> tuple[float, ...]:
        """Ask one engine after another until one answers; append to `failures` why they did not."""
        prompt_len = len(sample.prompt.token_ids)
        tokens = (*sample.prompt.token_ids, *sample.response_ids)
        while True:
            if serving := self._endpoint.health.serving:
                url = serving[(index + len(failures)) % len(serving)]
                try:
                    return tuple(await score_tokens(http, url, tokens, prompt_len - 1))
                except UnreachableError as error:
                    failures.append(str(error))
                    if self._throttle.is_due():
                        held = self._throttle.describe_held()
                        _log.warning("%s: %s%s; trying again", self._endpoint.role, error, held)
                except RolloutError as error:
                    raise RolloutError(
                        f"the {self._endpoint.role} cannot score sample {sample.sample_index} of"
                        f" prompt {sample.prompt.index}: {error}"
                    ) from None
            await asyncio.sleep(_PAUSE_S)


class Vocabulary(Protocol):
    """The part of a HuggingFace tokenizer that is used here."""

    def get_vocab(self) -> dict[str, int]: ...


def check_same_vocabulary(
    policy: Vocabulary, teacher: Vocabulary, model_path: str, teacher_path: str
) -> None:
    """Raise ValueError unless every token has the same id in both: a teacher gets token ids."""
    policy_ids = policy.get_vocab()
    teacher_ids = teacher.get_vocab()
    differing = sorted(
        token
        for token in policy_ids.keys() | teacher_ids.keys()
        if policy_ids.get(token) != teacher_ids.get(token)
    )
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher.path={teacher_path}: {len(differing)} tokens have other ids than in"
            f" model.path={model_path}, such as {token!r}: {_id_of(teacher_ids, token)} in place of"
            f" {_id_of(policy_ids, token)}; the teacher scores token ids, so it must have the"
            " policy's vocabulary"
        )


def _id_of(vocabulary: Mapping[str, int], token: str) -> object:
    return vocabulary.get(token, "none")
