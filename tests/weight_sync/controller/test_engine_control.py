"""SGLang's calls against an HTTP server: what is sent, and how each kind of failure is told."""

import asyncio
import base64
import json
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from aiohttp import web

from mcore_rl.process.http import open_session
from mcore_rl.weight_sync.controller.engine_control import (
    KV_CACHE,
    LOADER,
    WEIGHTS,
    EngineCallError,
    EngineControl,
    RefusedError,
)
from mcore_rl.weight_sync.wire import COMMAND_NAME

Answer = web.Response | float
"""A response of the server, or the seconds it takes over its answer."""
OK = {"success": True}
NO = {"success": False, "message": "not now"}


def reply(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def call(
    act: Callable[[EngineControl], Awaitable[Any]], *answers: Answer, timeout_s: float = 5.0
) -> tuple[Any, list[tuple[str, Any]]]:
    """The result of `act`, and path and body of each request; `answers` are given in order."""
    remaining = list(answers)
    requests: list[tuple[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        text = await request.text()
        requests.append((request.path_qs, json.loads(text) if text else None))
        answer = remaining.pop(0) if remaining else reply(OK)
        if isinstance(answer, web.Response):
            return answer
        await asyncio.sleep(answer)
        return reply(OK)

    async def run() -> Any:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with open_session(timeout_s) as http:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                return await act(EngineControl(http, url))
        finally:
            await runner.cleanup()

    return asyncio.run(run()), requests


def test_sizes_are_those_that_the_engine_tells() -> None:
    info = {
        "tp_size": 4,
        "ep_size": 2,
        "pp_size": 3,
        "attn_dp_size": 2,
        "custom_weight_loader": [LOADER],
    }
    sizes, requests = call(lambda engine: engine.read_parallel_sizes(), reply(info))
    assert (sizes.tp, sizes.ep, sizes.pp) == (4, 2, 3)
    assert sizes.engine_ranks == 12
    assert requests == [("/server_info", None)]


@pytest.mark.parametrize("loaders", [None, ["other.load"]])
def test_an_engine_without_the_loader_is_refused(loaders: list[str] | None) -> None:
    with pytest.raises(EngineCallError, match=rf"custom weight loaders .*, needs {LOADER}"):
        call(lambda engine: engine.read_parallel_sizes(), reply({"custom_weight_loader": loaders}))


def test_each_call_is_sglangs() -> None:
    async def act(engine: EngineControl) -> None:
        await engine.pause()
        await engine.resume()
        await engine.begin_update()
        await engine.end_update()
        await engine.commit(7)
        await engine.release([WEIGHTS, KV_CACHE])
        await engine.occupy([WEIGHTS])

    _, requests = call(act)
    assert requests == [
        ("/pause_generation", {"mode": "retract"}),
        ("/continue_generation", {}),
        ("/begin_weight_update", {"selector": "all"}),
        ("/end_weight_update", {}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
    ]


def test_a_command_goes_to_every_tensor_parallel_rank() -> None:
    command_u8 = torch.arange(5, dtype=torch.uint8)
    _, [(path, body)] = call(lambda engine: engine.run_loader(command_u8, 2, flush_cache=True))
    assert path == "/update_weights_from_tensor"
    assert (body["load_format"], body["flush_cache"]) == (LOADER, True)
    first, second = body["serialized_named_tensors"]
    assert first == second
    ((name, tensor),) = pickle.loads(base64.b64decode(first))
    assert name == COMMAND_NAME and torch.equal(tensor, command_u8)


def test_an_update_that_was_never_ended_is_ended_first() -> None:
    _, requests = call(lambda engine: engine.begin_update(), reply(NO, 400), reply(OK), reply(OK))
    assert [path for path, _ in requests] == [
        "/begin_weight_update",
        "/end_weight_update",
        "/begin_weight_update",
    ]


@pytest.mark.parametrize("status", [200, 400])
def test_a_refusal_is_told_with_the_engines_reason(status: int) -> None:
    with pytest.raises(RefusedError, match=r"engine http://\S+ refused /pause_generation: not now"):
        call(lambda engine: engine.pause(), reply(NO, status))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(text="boom", status=500), r"answered /pause_generation with 500: 'boom'"),
        (web.Response(text="fine"), r"answered /pause_generation with 200: 'fine'"),
        (reply({"detail": "none"}, 404), r"answered /pause_generation with 404: .*none"),
        (1.0, r"did not answer /pause_generation within 0.2 s"),
    ],
)
def test_any_other_answer_is_an_error_that_names_engine_and_call(
    answer: Answer, message: str
) -> None:
    with pytest.raises(EngineCallError, match=rf"engine http://\S+ {message}"):
        call(lambda engine: engine.pause(), answer, timeout_s=0.2)


def test_an_engine_that_cannot_be_reached_is_named() -> None:
    async def run() -> None:
        async with open_session(1.0) as http:
            await EngineControl(http, "http://127.0.0.1:9").pause()

    with pytest.raises(EngineCallError, match=r"engine http://127.0.0.1:9 failed in /pause"):
        asyncio.run(run())


def test_waiting_for_an_idle_engine_takes_an_answer_of_any_kind() -> None:
    _, requests = call(lambda engine: engine.wait_idle(2.5), web.Response(text="flushed"))
    assert requests == [("/flush_cache?timeout=2.5", None)]
    with pytest.raises(EngineCallError, match="with 500: 'busy'"):
        call(lambda engine: engine.wait_idle(2.5), web.Response(text="busy", status=500))
