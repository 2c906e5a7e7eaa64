"""Puts the answer together that an engine sends in parts as it draws a response.

engine  tokens 0-255 --> tokens 256-511 --> engine dies
client  [ 0 ................... 511 ]  goes on at another engine, as a response that moves does

SGLang sends a part for every `stream_interval` tokens, with `--incremental-streaming-output` only
what is new, as server-sent events: lines of `data: <JSON>`, the last of them `data: [DONE]`. A
request that is aborted in the queue, as one that lost its place in the KV cache, ends with a part
that repeats its last token and all of its log-probs.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

_EVENT, _BREAK, _DONE = b"data: ", b"\n\n", b"[DONE]"
CUT_OFF = {"type": "abort", "message": "the engine did not send the rest"}
"""The finish_reason of an answer that is not whole."""


def ask_for_parts(body: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the body of a request whose answer comes in parts of so many tokens."""
    parameters = {**body["sampling_params"], "stream_interval": num_tokens}
    return {**body, "sampling_params": parameters, "stream": True}


class StreamedAnswer:
    """The parts of an answer that have come."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._meta: dict[str, Any] = {}

    def add(self, part: Mapping[str, Any]) -> None:
        """Take the next part. Raises ValueError if it does not follow the one before."""
        meta = part["meta_info"]
        ids, logprobs = part["output_ids"], meta["output_token_logprobs"]
        if (meta["finish_reason"] or {}).get("type") == "abort":
            num_new = meta["completion_tokens"] - len(self._ids)
            ids, logprobs = ids[:num_new], logprobs[:num_new]
        self._ids += ids
        self._logprobs += logprobs
        self._meta = meta
        if len(self._ids) != meta["completion_tokens"]:
            raise ValueError(
                f"an engine sent {len(self._ids)} tokens in parts, and drew"
                f" {meta['completion_tokens']}: it was started without"
                " --incremental-streaming-output"
            )

    def make_answer(self) -> dict[str, Any]:
        """Return the answer as one that comes whole, as far as it has come."""
        told = {**self._meta, "output_token_logprobs": self._logprobs}
        told["finish_reason"] = self._meta.get("finish_reason") or CUT_OFF
        return {"output_ids": self._ids, "meta_info": told}

    @property
    def is_whole(self) -> bool:
        return bool(self._meta.get("finish_reason"))


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """Yield the JSON of each event until the last."""
    unread = b""
    async for data in content.iter_any():
        *events, unread = (unread + data).split(_BREAK)
        for event in events:
            text = event.removeprefix(_EVENT)
            if text == _DONE:
                return
            yield orjson.loads(text)
