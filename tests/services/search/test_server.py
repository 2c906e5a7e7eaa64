"""The server answers as Search-R1's does, refuses what is too much, and keeps its deadlines."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from mcore_rl.services.search.client import SearchClient, SearchUnavailableError
from mcore_rl.services.search.layout import Hit
from mcore_rl.services.search.replay import MissingRecordingError
from mcore_rl.services.search.server import SearchServer, ServerOptions, serve


class Echo:
    """Finds each query itself; queries in capitals name what shall happen."""

    name = "echo"
    num_passages = 7

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        for query in queries:
            match query:
                case "WAIT":
                    assert self.goes_on.wait(60)
                case "AWAY":
                    raise SearchUnavailableError("the web is away")
                case "MISSING":
                    raise MissingRecordingError("no recording")
                case "BREAK":
                    raise OSError("the disk is gone")
        return [[Hit({"id": query, "contents": query}, 1.0)] * topk for query in queries]


def in_server(use, **options: Any):
    """Return use(url, session, retriever) against a server on the same loop."""

    async def run():
        echo = Echo()
        server = SearchServer(echo, ServerOptions(port=0, **options))
        url = await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                return await use(url, session, echo)
        finally:
            echo.goes_on.set()
            await server.stop()

    return asyncio.run(run())


async def post(session, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with session.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_requests_are_answered_in_their_form() -> None:
    async def use(url, session, echo):
        full = await post(session, url, {"queries": ["a", "b"], "topk": 1, "return_scores": True})
        bare = await post(session, url, {"queries": ["a"]})
        return full, bare

    full, bare = in_server(use, topk=2)
    a, b = ({"id": name, "contents": name} for name in "ab")
    assert full == (
        200,
        {"result": [[{"document": a, "score": 1.0}], [{"document": b, "score": 1.0}]]},
    )
    assert bare == (200, {"result": [[a, a]]})


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"queries": "a"}, 400, "not a list"),
        ({"queries": ["AWAY"]}, 502, "the web is away"),
        ({"queries": ["MISSING"]}, 404, "no recording"),
        ({"queries": ["BREAK"]}, 500, "the disk is gone"),
        ({"queries": ["x" * (5 << 20)]}, 413, ""),
    ],
)
def test_a_refusal_says_why(body: Any, status: int, text: str) -> None:
    async def use(url, session, echo):
        async with session.post(url, json=body) as response:
            return response.status, await response.text()

    found, said = in_server(use)
    assert found == status and text in said


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"queries": ' + b"[" * 200_000, "nested too deeply"),
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b'"\xff"', "is no JSON"),
    ],
)
@pytest.mark.parametrize("charset", ["utf-8", "none-such"])
def test_a_body_that_is_no_json_is_answered_with_400(data: bytes, text: str, charset: str) -> None:
    async def use(url, session, echo):
        headers = {"Content-Type": f"application/json; charset={charset}"}
        async with session.post(url, data=data, headers=headers) as response:
            return response.status, await response.text()

    found, said = in_server(use)
    assert found == 400 and text in said


def test_beyond_the_queue_requests_are_refused_and_counted_until_they_end() -> None:
    async def use(url, session, echo):
        waiting = [
            asyncio.ensure_future(post(session, url, {"queries": ["WAIT"]})) for _ in range(3)
        ]
        async with asyncio.timeout(60):
            while (await health(session, url))["requests"] < 3:
                await asyncio.sleep(0.02)
        refused = await post(session, url, {"queries": ["a"]})
        echo.goes_on.set()
        done = await asyncio.gather(*waiting)
        return refused, [status for status, _ in done], await post(session, url, {"queries": ["a"]})

    refused, statuses, after = in_server(use, threads=2, queue_len=3)
    assert refused[0] == 429 and "3 requests wait: at most 3" in refused[1]["error"]
    assert statuses == [200, 200, 200] and after[0] == 200


async def health(session, url: str) -> dict[str, Any]:
    async with session.get(url.replace("/retrieve", "/healthz")) as response:
        assert response.status == 200
        return await response.json()


def test_a_request_that_takes_too_long_keeps_its_place_until_its_thread_ends() -> None:
    async def use(url, session, echo):
        late = await post(session, url, {"queries": ["WAIT"]})
        during = await health(session, url)
        echo.goes_on.set()
        async with asyncio.timeout(60):
            while (await health(session, url))["requests"]:
                await asyncio.sleep(0.02)
        return late, during["requests"]

    late, during = in_server(use, deadline_s=0.3)
    assert late[0] == 504 and "within 0.3 s" in late[1]["error"] and during == 1


def test_the_key_is_asked_for_and_health_is_open() -> None:
    async def use(url, session, echo):
        without = await post(session, url, {"queries": ["a"]})
        wrong = await post(session, url, {"queries": ["a"]}, Authorization="Bearer no")
        right = await post(session, url, {"queries": ["a"]}, Authorization="Bearer secret")
        return without[0], wrong[0], right[0], await health(session, url)

    *statuses, facts = in_server(use, key="secret")
    assert statuses == [401, 401, 200]
    assert facts["passages"] == 7 and facts["retriever"] == "echo"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"host": "0.0.0.0"}, r"--host=0\.0\.0\.0: .*--key-file"),
        ({"threads": 0}, "--threads=0"),
        ({"threads": 4, "queue_len": 3}, "--queue-len=3"),
        ({"deadline_s": 0}, "--deadline-s=0"),
        ({"topk": 0}, "--topk=0: from 1 to 100"),
        ({"topk": 101}, "--topk=101"),
    ],
)
def test_senseless_options_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerOptions(**options)
    assert "secret" not in repr(ServerOptions(host="0.0.0.0", key="secret"))


def test_a_taken_port_is_named() -> None:
    async def use(url, session, echo):
        port = int(url.split(":")[2].split("/")[0])
        with pytest.raises(ValueError, match=f"--port={port}: cannot listen there"):
            await SearchServer(echo, ServerOptions(port=port)).start()

    in_server(use)


def test_serving_ends_when_it_was_asked_once() -> None:
    seen = []

    def on_ready(url: str) -> bool:
        seen.append(SearchClient(url).retrieve(["a"], 1)[0][0].document["id"])
        return False

    asyncio.run(asyncio.wait_for(serve(Echo(), ServerOptions(port=0), on_ready), 60))
    assert seen == ["a"]
