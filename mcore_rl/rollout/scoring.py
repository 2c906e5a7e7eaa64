"""Asks engines for their log-probs of given sequences, without sampling anything.

The teacher, another model, scores the response tokens of samples.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.rollout.image_request import PATH, pack_request
from mcore_rl.rollout.served_models import ServedEndpoint
from mcore_rl.rollout.transport import RolloutError, find_not_finite
from mcore_rl.types import Images, Sample

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Time between two tries of a request."""


class UnreachableError(RolloutError):
    """The engine did not answer or had an internal error, so another try may help."""


async def score_sequences(
    url: str,
    sequences: Sequence[Sequence[int]],
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    images: Sequence[Images | None] = (),
    adapter: str = "",
) -> list[list[float]]:
    """Return log p(token t | tokens before it) at temperature 1, for each sequence.

    The first token of a sequence has none, so the result is one entry shorter. `headers` carry the
    engine's key. `images` has those of each sequence, or is empty; log-probs of their placeholders
    mean nothing. `adapter` names one that the engine serves; empty: its default. Raises
    RolloutError naming the engine and its answer.
    """
    images = images or [None] * len(sequences)
    async with open_session(timeout_s, headers) as http:
        calls = [
            score_tokens(http, url, tokens, 0, own, adapter)
            for tokens, own in zip(sequences, images, strict=True)
        ]
        return list(await asyncio.gather(*calls))


async def score_tokens(
    http: aiohttp.ClientSession,
    url: str,
    tokens: Sequence[int],
    start: int,
    images: Images | None = None,
    adapter: str = "",
) -> list[float]:
    """Return log p of tokens[start + 1:] at temperature 1, given tokens before each, and images.

    Raises RolloutError, or UnreachableError where another try may help.
    """
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
        **({"lora_path": adapter} if adapter else {}),
    }
    if images is None:
        call = http.post(f"{url}/generate", json=body)
    else:
        call = http.post(f"{url}{PATH}", data=pack_request(body, images))
    try:
        async with call as response:
            if response.status != 200:
                text = await response.text()
                kind = UnreachableError if response.status >= 500 else RolloutError
                raise kind(f"engine {url} scored nothing: HTTP {response.status}: {text[:500]}")
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        told = describe_error(error, f"no answer within {http.timeout.total} s")
        raise UnreachableError(f"engine {url} scored nothing: {told}") from error
    # The token ids beside the log-probs can't be checked: SGLang reports the vocabulary's last one
    # as 0.
    entries = answer["meta_info"]["input_token_logprobs"]
    if len(entries) != len(tokens) - start:
        raise RolloutError(
            f"engine {url} scored {len(entries)} tokens of a sequence of {len(tokens)} from token"
            f" {start} on"
        )
    logprobs = [entry[0] for entry in entries[1:]]
    bad = find_not_finite(logprobs)
    if bad is not None and images is None:
        raise RolloutError(
            f"engine {url} gives token {start + 1 + bad} of a sequence of {len(tokens)} the"
            f" log-prob {logprobs[bad]}, which is no finite number: its weights or its KV cache"
            " hold NaN (docs/debugging.md#weights)"
        )
    return [math.nan if logprob is None else logprob for logprob in logprobs]


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
