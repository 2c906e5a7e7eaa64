"""Connections that servers are about to close are not used again."""

import asyncio
import socket

from aiohttp import web

from mcore_rl.process.http import open_session


async def connections_of(pause_s: float) -> int:
    """How many the server sees of two requests with a pause between them."""
    seen = set()

    async def answer(request: web.Request) -> web.Response:
        seen.add(request.transport)
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    async with open_session(5.0) as http:
        for wait_s in (pause_s, 0.0):
            async with http.get(url) as response:
                assert await response.text() == "ok"
            await asyncio.sleep(wait_s)
    await runner.cleanup()
    return len(seen)


def test_a_connection_that_lay_idle_is_left_alone() -> None:
    assert asyncio.run(connections_of(0.1)) == 1
    assert asyncio.run(connections_of(2.5)) == 2


def test_a_machine_that_is_gone_without_a_word_is_noticed_within_a_minute() -> None:
    async def probes() -> tuple[int, int]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n")

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with open_session(5.0) as http, http.get(f"http://127.0.0.1:{port}/") as response:
            assert response.connection is not None and response.connection.transport is not None
            own = response.connection.transport.get_extra_info("socket")
            idle_s, interval_s, count = (
                own.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            is_on = own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        server.close()
        return is_on, idle_s + interval_s * count

    is_on, noticed_s = asyncio.run(probes())
    assert is_on and noticed_s <= 60
