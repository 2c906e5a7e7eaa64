"""The free KV cache of engines is read off their loads, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from aiohttp import web

from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_room import EngineRoom
from mcore_rl.rollout.engine_spec import EngineAddress

DEADLINE_S = 30.0


@asynccontextmanager
async def serve(usages: list[float]) -> AsyncIterator[EngineAddress]:
    """Serve SGLang's /v1/loads with the usage of each data-parallel rank; none: an error."""

    async def loads(request: web.Request) -> web.Response:
        if not usages:
            return web.json_response({"detail": "no"}, status=500)
        return web.json_response({"loads": [{"token_usage": usage} for usage in usages]})

    app = web.Application()
    app.router.add_get("/v1/loads", loads)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield EngineAddress(f"http://127.0.0.1:{runner.addresses[0][1]}", "engine.log")
    finally:
        await runner.cleanup()


def test_the_engine_with_most_room_counts_by_its_fullest_rank() -> None:
    first, second = [0.75, 0.5], [0.25, 0.875]

    async def run() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            serve(first) as one,
            serve(second) as two,
            aiohttp.ClientSession() as http,
        ):
            health = EngineHealth([one.url, two.url])
            room = EngineRoom(http, [one, two], health, every_s=0.01)
            assert room.most_free() is None
            watching = asyncio.create_task(room.watch())
            await until_free(room, 0.25)
            second[:] = [0.0, 0.125]
            await until_free(room, 0.875)
            health.set_serving([one.url], {})
            assert room.most_free() == 0.25
            first.clear()
            await until_free(room, None)
            first[:] = [0.5]
            await until_free(room, 0.5)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    asyncio.run(run())


async def until_free(room: EngineRoom, share: float | None) -> None:
    while room.most_free() != share:
        await asyncio.sleep(0.005)
