"""Async client of the engines: prompts in, samples out (token ids, log-probs, weight versions)."""

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch
from torch import Tensor

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.rotation import Rotation
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.25
_KEEPALIVE_S = 2.0
"""Below the 5 s after which SGLang closes an idle connection, lest a request meets the closing."""


@dataclass(frozen=True)
class EngineAddress:
    url: str
    log_path: str

    def __str__(self) -> str:
        return f"engine {self.url} (log {self.log_path})"


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature 0 is greedy, top_k -1 keeps the whole vocabulary.

    Log-probs are those of the distribution at this temperature before top_p and top_k cut it. The seed counts
    only on engines that sample deterministically. `routed_experts` asks which experts each token went to.
    """

    max_response_len: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    routed_experts: bool = False


class EngineError(RuntimeError):
    """An engine failed a request for good; the message names the engine, its log file and the prompt."""


class _Transient(Exception):
    """A failure worth another try."""


@dataclass
class _Engine:
    address: EngineAddress
    num_in_flight: int = 0


class RolloutClient:
    """Spreads requests over engines: bounded concurrency, least loaded first, another engine on failure."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        stop_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        experts_shape: tuple[int, int] | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """`experts_shape`: layers of the model and experts per token, if the engines tell of the latter.
        `rotation`: which engines serve, asked before each request; None: all of them, always.
        """
        if not engines:
            raise ValueError("RolloutClient needs at least one engine")
        self._rotation = rotation or Rotation([address.url for address in engines])
        self._engines = [_Engine(address) for address in engines]
        self._config = config
        self._stop_token_ids = list(stop_token_ids)
        self._decode = decode
        self._experts_shape = experts_shape

    async def generate(self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> list[Sample]:
        """`num_samples` samples of each prompt, grouped by prompt in the order of `prompts`.

        Connection losses, timeouts and aborted requests are tried again, on another engine if there is one.
        Raises EngineError for a request that fails config.retries + 1 times, and then cancels the others.
        """
        slots = asyncio.Semaphore(self._config.max_concurrency * len(self._engines))
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    started = [
                        tasks.create_task(self._one(session, slots, _Request(prompt, index, group), sampling))
                        for prompt in prompts
                        for group in [_Group(num_samples)]
                        for index in range(num_samples)
                    ]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [task.result() for task in started]

    async def _one(
        self,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        request: "_Request",
        sampling: Sampling,
    ) -> Sample:
        """One sample, with its retries."""
        body = self._body(request, sampling)
        failed: list[_Engine] = []
        async with slots:
            while True:
                engine = self._pick(request, failed)
                try:
                    answer = await self._post(session, engine, body)
                    return _make_sample(request, answer, self._decode, self._experts_shape)
                except (aiohttp.ClientError, TimeoutError, _Transient) as failure:
                    failed.append(engine)
                    reason = f"{type(failure).__name__}: {failure}"
                if len(failed) > self._config.retries:
                    raise EngineError(
                        f"{engine.address}: {request} failed {len(failed)} times, last with {reason}"
                    )
                _log.warning("%s: %s failed with %s; trying again", engine.address, request, reason)
                await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** (len(failed) - 1))

    def _pick(self, request: "_Request", failed: Sequence[_Engine]) -> _Engine:
        """The engine of the prompt's other samples, which caches the prompt, unless it is too loaded."""
        in_rotation = [e for e in self._engines if not self._rotation.why_out(e.address.url)]
        if not in_rotation:
            reasons = "; ".join(
                f"{e.address}: {self._rotation.why_out(e.address.url)}" for e in self._engines
            )
            raise EngineError(f"no engine in rotation for {request}: {reasons}")
        candidates = [engine for engine in in_rotation if engine not in failed] or in_rotation
        least_loaded = min(candidates, key=lambda engine: engine.num_in_flight)
        home = request.group.home
        slack = request.group.num_samples
        if home in candidates and home.num_in_flight < least_loaded.num_in_flight + slack:
            return home
        request.group.home = least_loaded
        return least_loaded

    def _body(self, request: "_Request", sampling: Sampling) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_response_len,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": self._stop_token_ids,
        }
        if sampling.seed is not None and self._config.deterministic:
            parameters["sampling_seed"] = sample_seed(
                sampling.seed, request.prompt.index, request.sample_index
            )
        return {
            "input_ids": request.prompt.token_ids,
            "sampling_params": parameters,
            "return_logprob": True,
            "return_routed_experts": sampling.routed_experts and self._experts_shape is not None,
        }

    async def _post(
        self, session: aiohttp.ClientSession, engine: _Engine, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The engine's answer; raises _Transient or aiohttp's errors where another try may help."""
        engine.num_in_flight += 1
        try:
            async with session.post(f"{engine.address.url}/generate", json=body) as response:
                text = await response.text()
        finally:
            engine.num_in_flight -= 1
        if response.status >= 500:
            raise _Transient(f"HTTP {response.status}: {text[:500]}")
        if response.status != 200:
            raise EngineError(f"{engine.address} refused a request with HTTP {response.status}: {text[:500]}")
        answer = json.loads(text)
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise _Transient(f"aborted: {reason.get('message')}")
        return answer


@dataclass
class _Group:
    """The samples of one prompt and the engine they prefer."""

    num_samples: int
    home: _Engine | None = None


@dataclass(frozen=True)
class _Request:
    prompt: Prompt
    sample_index: int
    group: _Group

    def __str__(self) -> str:
        return f"prompt {self.prompt.index} of {self.prompt.data_source!r}, sample {self.sample_index},"


def sample_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A seed in [0, 2**63) that differs between the samples of a run."""
    digest = hashlib.blake2b(f"{seed} {prompt_index} {sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _make_sample(
    request: _Request,
    answer: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    experts_shape: tuple[int, int] | None,
) -> Sample:
    meta = answer["meta_info"]
    response_ids = tuple(answer["output_ids"])
    logprobs, logprob_ids = zip(
        *((entry[0], entry[1]) for entry in meta["output_token_logprobs"]), strict=True
    )
    assert logprob_ids == response_ids, f"{request} log-probs are of {logprob_ids}, tokens are {response_ids}"
    return Sample(
        prompt=request.prompt,
        sample_index=request.sample_index,
        response_ids=response_ids,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        versions=tuple(
            VersionSpan(span["start"], span["end"], WeightVersion(int(span["version"])))
            for span in meta["weight_versions"]
        ),
        text=decode(response_ids),
        routed_experts=_routed_experts(meta, experts_shape),
    )


def _routed_experts(meta: Mapping[str, Any], shape: tuple[int, int] | None) -> Tensor | None:
    """int16 [tokens that the engine ran, layers, experts per token]."""
    encoded = meta.get("routed_experts")
    if encoded is None or shape is None:
        return None
    flat = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
    return flat.view(-1, *shape).to(torch.int16)
