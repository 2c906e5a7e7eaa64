"""Connections that servers are about to close are not used again."""

import asyncio

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
