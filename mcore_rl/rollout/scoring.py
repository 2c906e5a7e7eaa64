"""Asks an engine for its log-probs of given sequences, without sampling anything."""

import asyncio
import math
from collections.abc import Mapping, Sequence

import aiohttp

from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.rollout.finite import find_not_finite
from mcore_rl.rollout.image_request import PATH, pack_request
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import Images


class UnreachableError(RolloutError):
    """The engine did not answer or had an internal error, so another try may help."""


async def score_sequences(
    url: str,
    sequences: Sequence[Sequence[int]],
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    images: Sequence[Images | None] = (),
) -> list[list[float]]:
    """Return log p(token t | tokens before it) at temperature 1, for each sequence.

    The first token of a sequence has none, so the result is one entry shorter. `headers` carry the
    engine's key. `images` has those of each sequence, or is empty; log-probs of their placeholders
    mean nothing. Raises RolloutError naming the engine and its answer.
    """
    images = images or [None] * len(sequences)
    async with open_session(timeout_s, headers) as http:
        calls = [
            score_tokens(http, url, tokens, 0, own)
            for tokens, own in zip(sequences, images, strict=True)
        ]
        return list(await asyncio.gather(*calls))


async def score_tokens(
    http: aiohttp.ClientSession,
    url: str,
    tokens: Sequence[int],
    start: int,
    images: Images | None = None,
) -> list[float]:
    """Return log p of tokens[start + 1:] at temperature 1, given all tokens before each, and the
    images of the sequence.

    Raises RolloutError, or UnreachableError where another try may help.
    """
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
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
