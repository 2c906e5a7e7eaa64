"""A gateway on loopback for tests, and clients that reach it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from mcore_rl.agents.gateway.admission import GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.gateway.sessions import EpisodeChat, Session

DEADLINE_S = 30.0


@asynccontextmanager
async def open_gateway(**options: Any) -> AsyncIterator[Gateway]:
    async with Gateway(chr, GatewayOptions(**options), count_tokens=lambda request: 7) as gateway:
        yield gateway


def in_session(
    chat: EpisodeChat, act: Callable[[Gateway, Session], Awaitable[None]], **options: Any
) -> None:
    """Run `act` with a session of this episode; a gateway with `options` serves it."""

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), open_gateway(**options) as gateway:
            await act(gateway, gateway.open_session(chat))

    asyncio.run(run())


@asynccontextmanager
async def openai_client(session: Session, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"max_retries": 0, "timeout": DEADLINE_S, **options}
    url = options.pop("base_url", session.openai_url)
    async with openai.AsyncOpenAI(api_key=session.key, base_url=url, **options) as client:
        yield client


async def post(
    url: str, body: Any = None, headers: dict[str, str] | None = None, data: bytes | None = None
) -> tuple[int, Any]:
    """Return status and JSON body of a request's answer; GET without a body."""
    async with aiohttp.ClientSession() as session:
        method = "GET" if body is None and data is None else "POST"
        async with session.request(method, url, json=body, data=data, headers=headers) as response:
            return response.status, await response.json()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until this holds; the test's deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.005)


class CuttingProxy:
    """Passes bytes on to a server, and cuts the connections of the first `num_cuts` requests.

    They are cut as soon as the request has been passed on, or, if `after_answer`, when the answer
    begins to arrive.
    """

    def __init__(self, port: int, num_cuts: int, after_answer: bool = False) -> None:
        self._port = port
        self._num_cuts = num_cuts
        self._after_answer = after_answer
        self.num_connections = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yield the URL that leads through the proxy."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        is_cut = self.num_connections <= self._num_cuts
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        up = asyncio.create_task(_copy(reader, far_writer))
        try:
            if is_cut and not self._after_answer:
                await asyncio.sleep(0.1)
                return
            if is_cut:
                await far_reader.read(1)
                return
            await _copy(far_reader, writer)
        finally:
            up.cancel()
            for end in (writer, far_writer):
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])
