"""Carries requests to engines and samples back: by HTTP, or as a simulation pleases.

EngineAsker carries other questions: what SGLang's parsers make of a text.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
import orjson

from mcore_rl.config import RolloutConfig
from mcore_rl.data.images.batch import join_patches
from mcore_rl.data.images.shared_patches import SharedPatches, map_patches
from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.process.server_keys import admin_headers, user_headers
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.image_request import NOT_HERE, PATH, pack_request, refer_request
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.kv_admission import ask_free_kv
from mcore_rl.rollout.request import Request, RoutedExpertsShape, Sampling, make_body, make_sample
from mcore_rl.rollout.streamed_answer import StreamedAnswer, ask_for_parts, read_events
from mcore_rl.types import Prompt, Sample

_ABORT_S = 10.0


def find_not_finite(logprobs: Sequence[float | None]) -> int | None:
    """Return the index of the first log-prob that is NaN, infinite or missing; None: there is none.

    A token that was drawn has a probability above 0, so -inf is a fault, too.
    """
    for index, logprob in enumerate(logprobs):
        if logprob is None or not math.isfinite(logprob):
            return index
    return None


class RolloutError(RuntimeError):
    """A request failed for good; the message names the engine, its log file and the prompt."""


class TransientError(Exception):
    """A failure worth another try. `begun`: what the engine had drawn until then, if it told."""

    def __init__(self, message: str, begun: Sample | None = None) -> None:
        super().__init__(message)
        self.begun = begun


class AbortedError(TransientError):
    """The engine ended the request."""


class EngineTransport(Protocol):
    """An open way to engines."""

    async def sample(self, engine: EngineAddress, request: Request, sampling: Sampling) -> Sample:
        """Return one sample.

        Raises TransientError if another try may help, RolloutError if the engine refuses.
        """
        ...

    async def abort_all(self, engine: EngineAddress) -> None:
        """Have the engine end its requests.

        Raises nothing for an engine that does not answer: its requests fail by themselves.
        """
        ...

    async def abort(self, engine: EngineAddress, rid: str) -> None:
        """Have the engine end one request, as `abort_all` ends all."""
        ...

    async def free_kv(self, engine: EngineAddress) -> float | None:
        """Return the free share of the engine's KV cache, 0 to 1; None: it does not tell."""
        ...


OpenTransport = Callable[[], AbstractAsyncContextManager[EngineTransport]]


@dataclass(frozen=True)
class HttpOptions:
    """How requests to SGLang are made, and how its answers are read.

    timeout_s       of each request
    deterministic   engines sample by the seeds of requests
    experts_shape   of the experts that engines report; None asks for none
    indexer_shape   of the chosen keys that engines report; None asks for none
    stream_every        tokens of a response after which engines send what they have drawn; 0: they
                    send it whole
    patches         makes the patches of this node's images; None: prompts have none
    """

    timeout_s: float
    deterministic: bool
    stop_token_ids: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    experts_shape: RoutedExpertsShape | None
    patches: SharedPatches | None = None
    indexer_shape: IndexerTopkShape | None = None
    stream_every: int = 0

    @staticmethod
    def make(
        rollout: RolloutConfig,
        stop_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        experts_shape: RoutedExpertsShape | None = None,
        indexer_shape: IndexerTopkShape | None = None,
    ) -> "HttpOptions":
        return HttpOptions(
            rollout.request_timeout_s,
            rollout.deterministic,
            stop_token_ids,
            decode,
            experts_shape,
            indexer_shape=indexer_shape,
            stream_every=rollout.stream_every if rollout.speculate == "none" else 0,
        )

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[HttpTransport]":
        async with open_session(self.timeout_s) as http:
            yield HttpTransport(http, self)


class HttpTransport:
    """Posts to SGLang's /generate over kept connections."""

    def __init__(self, http: aiohttp.ClientSession, options: HttpOptions) -> None:
        self._http = http
        self._options = options
        self._far: set[str] = set()
        """Urls of engines on other machines, which cannot map files of this one."""

    async def sample(self, engine: EngineAddress, request: Request, sampling: Sampling) -> Sample:
        """See EngineTransport."""
        supported = self._keep_supported(sampling)
        body = make_body(request, supported, self._options.stop_token_ids)
        streamed = StreamedAnswer()
        streams = self._may_stream(request, body)
        try:
            if request.prompt.images:
                answer = await self._post_images(engine, body, request.prompt)
            elif streams:
                answer = await self._stream(engine, body, streamed)
            else:
                answer = await self._post(engine, "/generate", orjson.dumps(body))
        except (aiohttp.ClientError, TimeoutError) as failure:
            silent = f"no answer within rollout.request_timeout_s={self._options.timeout_s:g}"
            begun = self._read_parts(engine, request, streamed)
            raise TransientError(describe_error(failure, silent), begun) from None
        _refuse_not_finite(engine, request, answer["meta_info"])
        shapes = (
            self._options.experts_shape if supported.routed_experts else None,
            self._options.indexer_shape if supported.indexer_topk else None,
        )
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            goes_on = bool(request.rid) or streams
            begun = self._read_begun(request, answer, *shapes) if goes_on else None
            if begun and (end := self._find_end(begun, sampling)):
                return replace(begun, finish_reason=end)
            raise AbortedError(f"the engine aborted it: {reason.get('message')}", begun)
        return make_sample(request, answer, self._options.decode, *shapes)

    def _may_stream(self, request: Request, body: Mapping[str, Any]) -> bool:
        """Return whether an answer comes in parts: whether another engine could go on with them.

        Experts and chosen keys are told at the end alone, so without it a response is drawn again.
        One that ends at texts is, too: they may lie across two parts.
        """
        is_long = body["sampling_params"]["max_new_tokens"] > self._options.stream_every > 0
        reports = body["return_routed_experts"] or body.get("return_indexer_topk")
        return is_long and not (reports or request.stop or request.prompt.images)

    def _read_parts(
        self, engine: EngineAddress, request: Request, streamed: StreamedAnswer
    ) -> Sample | None:
        """Return what came of an answer that is not whole; None if nothing did."""
        answer = streamed.make_answer()
        if not answer["output_ids"] or "weight_versions" not in answer["meta_info"]:
            return None
        _refuse_not_finite(engine, request, answer["meta_info"])
        return make_sample(request, answer, self._options.decode, None)

    def _read_begun(
        self,
        request: Request,
        answer: dict[str, Any],
        experts_shape: RoutedExpertsShape | None,
        indexer_shape: IndexerTopkShape | None,
    ) -> Sample | None:
        """Return what an aborted request had drawn, if it can go on elsewhere.

        One that waited to be computed again was aborted without its experts and chosen keys: those
        of another pass would not be the ones that drew its tokens, so it is drawn again.
        """
        told = answer["meta_info"]
        if not answer.get("output_ids") or "weight_versions" not in told:
            return None
        if experts_shape is not None and not told.get("routed_experts"):
            return None
        if indexer_shape is not None and not told.get("indexer_topk"):
            return None
        return make_sample(request, answer, self._options.decode, experts_shape, indexer_shape)

    def _find_end(self, sample: Sample, sampling: Sampling) -> str:
        """Return the finish_reason of a response that is whole, empty if it is not.

        SGLang calls it aborted if the pass that drew its last token was under way at the abort.
        """
        if sample.response_ids[-1] in self._options.stop_token_ids:
            return "stop"
        return "length" if sample.response_len >= sampling.max_response_len else ""

    async def abort_all(self, engine: EngineAddress) -> None:
        """See EngineTransport."""
        await self._abort(engine, {"abort_all": True})

    async def abort(self, engine: EngineAddress, rid: str) -> None:
        """See EngineTransport."""
        await self._abort(engine, {"rid": rid})

    async def free_kv(self, engine: EngineAddress) -> float | None:
        """See EngineTransport."""
        return await ask_free_kv(self._http, engine)

    async def _abort(self, engine: EngineAddress, body: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(_ABORT_S)
        url = f"{engine.url}/abort_request"
        headers = admin_headers(engine.keys)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.post(url, json=body, headers=headers, timeout=timeout):
                pass

    def _keep_supported(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with a seed, experts and keys only where the engines support them."""
        return replace(
            sampling,
            seed=sampling.seed if self._options.deterministic else None,
            routed_experts=sampling.routed_experts and self._options.experts_shape is not None,
            indexer_topk=sampling.indexer_topk and self._options.indexer_shape is not None,
        )

    async def _post_images(
        self, engine: EngineAddress, body: dict[str, Any], prompt: Prompt
    ) -> dict[str, Any]:
        """Post a request whose patches the engine maps, or gets if it is on another machine."""
        patches = self._options.patches
        if patches is None:
            raise RolloutError(
                f"prompt {prompt.index} of {prompt.data_source!r} has images, but this command"
                " makes no patches of them: take prompts of text alone"
            )
        placed = [await asyncio.to_thread(patches.place, image) for image in prompt.images]
        if engine.url not in self._far:
            try:
                return await self._post(engine, PATH, refer_request(body, placed))
            except _NotHereError:
                if all(map_patches(each) is not None for each in placed):
                    self._far.add(engine.url)
        packed = await asyncio.to_thread(_pack, body, prompt, patches)
        return await self._post(engine, PATH, packed, "application/octet-stream")

    async def _post(
        self, engine: EngineAddress, path: str, data: bytes, kind: str = "application/json"
    ) -> dict[str, Any]:
        url = f"{engine.url}{path}"
        headers = {**user_headers(engine.keys), "Content-Type": kind}
        async with self._http.post(url, data=data, headers=headers) as response:
            body_bytes = await response.read()
        if response.status == NOT_HERE and path == PATH:
            raise _NotHereError
        _refuse_status(engine, response.status, body_bytes)
        return orjson.loads(body_bytes)

    async def _stream(
        self, engine: EngineAddress, body: Mapping[str, Any], streamed: StreamedAnswer
    ) -> dict[str, Any]:
        """Return the answer, put together of its parts; `streamed` keeps those that come.

        Raises aiohttp.ClientError if the engine does not send all of them.
        """
        url = f"{engine.url}/generate"
        headers = {**user_headers(engine.keys), "Content-Type": "application/json"}
        data = orjson.dumps(ask_for_parts(body, self._options.stream_every))
        async with self._http.post(url, data=data, headers=headers) as response:
            if response.status != 200:
                _refuse_status(engine, response.status, await response.read())
            try:
                async for part in read_events(response.content):
                    if "error" in part:
                        error = part["error"]
                        _refuse_status(engine, error["code"], error["message"].encode())
                    streamed.add(part)
            except (aiohttp.ClientError, TimeoutError):
                if not streamed.is_whole:
                    raise
        if not streamed.is_whole:
            raise aiohttp.ClientPayloadError("the engine ended the connection within an answer")
        answer = streamed.make_answer()
        reason = answer["meta_info"]["finish_reason"]
        status = reason.get("status_code") or 200
        if status < 500:  # one that goes on elsewhere may have been aborted by a failure
            _refuse_status(engine, status, str(reason.get("message")).encode())
        return answer


def _refuse_status(engine: EngineAddress, status: int, body: bytes) -> None:
    """Raise TransientError or RolloutError if the status of an answer says that it failed."""
    if status == 200:
        return
    text = body[:500].decode(errors="replace")
    if status >= 500:
        raise TransientError(f"HTTP {status}: {text}")
    raise RolloutError(f"{engine} refused a request with HTTP {status}: {text}")


def _refuse_not_finite(engine: EngineAddress, request: Request, meta: dict[str, Any]) -> None:
    """Raise RolloutError, which names the engine and its weights, if a log-prob is no number."""
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())]
    bad = find_not_finite(logprobs)
    if bad is None:
        return
    versions = [span["version"] for span in meta["weight_versions"]]
    raise RolloutError(
        f"{engine} drew token {bad} of {request} with the log-prob {logprobs[bad]}, which is no"
        f" finite number, from weights {', '.join(map(str, versions))}: its weights or its KV"
        " cache hold NaN (docs/debugging.md#weights)"
    )


class _NotHereError(Exception):
    """The engine does not have the files that a request refers to."""


def _pack(body: dict[str, Any], prompt: Prompt, patches: SharedPatches) -> bytes:
    images = join_patches([[patches.read(image) for image in prompt.images]])
    assert images is not None, prompt
    return pack_request(body, images)


class EngineAsker:
    """Posts to the engines in turn; one that fails is passed over for the next."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        engines: Sequence[EngineAddress],
        health: EngineHealth,
        home: int | None = None,
    ) -> None:
        """`http` has the deadline of each request.

        home   collector whose engines are asked that join later; None: all that join
        """
        self._http = http
        self._engines = list(engines)
        self._health = health
        self._home = home
        self._num_asked = 0

    async def __call__(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON that an engine answers.

        Raises ValueError if it refuses or its parser fails, RolloutError if no engine answers.
        """
        failures = []
        for engine in self._list_in_turn():
            try:
                return await self._post(engine, path, body)
            except (aiohttp.ClientError, TimeoutError) as failure:
                silent = f"no answer within {self._http.timeout.total} s"
                failures.append(f"{engine}: {describe_error(failure, silent)}")
        raise RolloutError(f"no engine answers {path}: {'; '.join(failures) or 'none serves'}")

    def _list_in_turn(self) -> list[EngineAddress]:
        """Return the engines that serve, another one first each time."""
        engines = self._health.list_current(self._engines, self._home)
        serving = [engine for engine in engines if not self._health.why_out(engine.url)]
        self._num_asked += 1
        first = self._num_asked % max(len(serving), 1)
        return serving[first:] + serving[:first]

    async def _post(
        self, engine: EngineAddress, path: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        headers = user_headers(engine.keys)
        url = f"{engine.url}{path}"
        async with self._http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ValueError(f"{engine} answers {path} with HTTP {response.status}: {text}")
            return await response.json()
