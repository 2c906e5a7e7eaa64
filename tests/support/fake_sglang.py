"""An HTTP server without a model that speaks the SGLang protocol of sampling and memory control."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from torch import Tensor

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.image_request import NOT_HERE, PATH, resolve_request, unpack_request

Route = tuple[int, Any]
"""HTTP status and body: text, or what is sent as JSON."""


@contextmanager
def loop_with_quick_retries(
    monkeypatch: pytest.MonkeyPatch, client: ModuleType
) -> Iterator[EventLoop]:
    """Run an event loop; requests of the module `client` wait 10 ms before their first retry."""
    monkeypatch.setattr(client, "_FIRST_BACKOFF_S", 0.01)
    loop = EventLoop()
    try:
        yield loop
    finally:
        loop.close()


class FakeSGLang:
    """Answers with `max_new_tokens` tokens, or with the Route that `answer` returns.

    num_free   so many requests for samples are answered at once; others wait for `resume`
    calls      (path, JSON body) of all requests but those for samples
    sampled    JSON bodies of the requests for samples, in the order of arrival
    free_kv    what it tells of its KV cache, in tokens of a hundred; None: nothing
    images     (whether they came as files, pixels, grids) of requests with images
    is_far     answer as an engine on a machine without the files of patches
    num_parts  so many parts of an answer that is asked for in parts are sent, and then the
               connection breaks; None: all are
    """

    def __init__(self, loop: EventLoop, version: int = 0) -> None:
        self.version = version
        self.calls: list[tuple[str, Any]] = []
        self.sampled: list[Mapping[str, Any]] = []
        self.answer: Callable[[Mapping[str, Any]], Route | None] = lambda body: None
        self.num_free = 1_000_000
        self.free_kv: int | None = None
        self.images: list[tuple[bool, Tensor, Tensor]] = []
        self.is_far = False
        self.num_parts: int | None = None
        self._loop = loop
        self.url = loop.run(self._start())
        self.address = EngineAddress(self.url, "fake.log")

    async def _start(self) -> str:
        self._is_open = asyncio.Event()
        self._is_aborting = False
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post(PATH, self._generate_images)
        app.router.add_post("/{path:.*}", self._other)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def resume(self) -> None:
        """Answer all requests, those that wait included."""
        self._loop.run(self.let_go())

    def stop(self) -> None:
        self._loop.run(self._runner.cleanup())

    async def let_go(self) -> None:
        """Do as `resume` does, called on the engine's loop."""
        self._is_open.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.sampled.append(body)
        if len(self.sampled) > self.num_free and not self._is_open.is_set():
            await self._is_open.wait()
            if self._is_aborting:
                reason = {"type": "abort", "message": "asked to"}
                return web.json_response(sampled_answer(body, self.version, finish_reason=reason))
        route = self.answer(body)
        if body.get("stream"):
            route = route or (200, sampled_answer(body, self.version))
            if route[0] == 200:
                return await self._send_parts(request, route[1])
        if route is not None:
            return _response(route)
        return web.json_response(sampled_answer(body, self.version))

    async def _send_parts(self, request: web.Request, answer: Any) -> web.StreamResponse:
        """Send an answer as server-sent events, or break the connection within it."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        interval = self.sampled[-1]["sampling_params"]["stream_interval"]
        parts = list(cut_answer(answer, interval)) if "output_ids" in answer else [answer]
        for part in parts[: self.num_parts]:
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        if self.num_parts is not None:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _loads(self, request: web.Request) -> web.Response:
        if self.free_kv is None:
            return web.json_response({}, status=404)
        used = 100 - self.free_kv
        load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": used}
        load |= {"num_total_tokens": used, "max_total_num_tokens": 100}
        return web.json_response({"loads": [load]})

    async def _generate_images(self, request: web.Request) -> web.Response:
        """Note the images, and answer as to a request without them."""
        data = await request.read()
        is_json = request.content_type == "application/json"
        if is_json and self.is_far:
            return web.json_response({"error": "no patches"}, status=NOT_HERE)
        body, images = resolve_request(data) if is_json else unpack_request(data)
        self.images.append((is_json, images.pixels_PD, images.grids_I3))
        self.sampled.append(body)
        return web.json_response(sampled_answer(body, self.version))

    async def _other(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        if request.path == "/abort_request":
            self._is_aborting = True
            self._is_open.set()
        route = self.answer({"path": request.path, **(body or {})})
        return _response(route or (200, {"success": True}))


def sampled_answer(body: Mapping[str, Any], version: int, **changes: Any) -> dict[str, Any]:
    """SGLang's answer to a request for a sample; `changes` replace entries of meta_info."""
    num_tokens = body["sampling_params"]["max_new_tokens"]
    output_ids = [10 + t for t in range(num_tokens)]
    meta = {
        "output_token_logprobs": [[-0.5 - t, token, None] for t, token in enumerate(output_ids)],
        "finish_reason": {"type": "length"},
        "weight_versions": [{"start": 0, "end": num_tokens, "version": str(version)}],
    }
    return {"output_ids": output_ids, "meta_info": {**meta, **changes}}


def cut_answer(answer: Mapping[str, Any], interval: int) -> Iterator[dict[str, Any]]:
    """Yield SGLang's parts of an answer, of so many tokens each, only with what is new in each."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    for first in range(0, len(ids), interval):
        last = min(first + interval, len(ids))
        [span] = meta["weight_versions"]
        told = {
            "output_token_logprobs": meta["output_token_logprobs"][first:last],
            "finish_reason": meta["finish_reason"] if last == len(ids) else None,
            "weight_versions": [{**span, "end": last}],
            "completion_tokens": last,
        }
        yield {"output_ids": ids[first:last], "meta_info": {**meta, **told}}


def _response(route: Route) -> web.Response:
    status, body = route
    if isinstance(body, str):
        return web.Response(status=status, text=body)
    return web.json_response(body, status=status)
