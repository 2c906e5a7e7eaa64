"""The free KV cache of engines is read off their loads, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import aiohttp
import pytest
from aiohttp import web

from mcore_rl.rollout.engine_health import EngineHealth, EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.kv_admission import FreeKvMonitor, KvAdmission, ask_free_kv

DEADLINE_S = 30.0


@asynccontextmanager
async def serve(usages: list[float], num_waiting: int = 0) -> AsyncIterator[EngineAddress]:
    """Serve SGLang's /v1/loads with the usage of each data-parallel rank; none: an error.

    Of a cache of 8 tokens; two requests run, those that wait have one token each.
    """

    async def loads(request: web.Request) -> web.Response:
        if not usages:
            return web.json_response({"detail": "no"}, status=500)
        load = {"max_total_num_tokens": 8, "num_running_reqs": 2, "num_waiting_reqs": num_waiting}
        loads = [
            {**load, "num_used_tokens": 8 * usage, "num_total_tokens": 8 * usage + num_waiting}
            for usage in usages
        ]
        return web.json_response({"loads": loads})

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
            monitor = FreeKvMonitor(partial(ask_free_kv, http), [one, two], health, every_s=0.01)
            assert monitor.most_free() is None
            watching = asyncio.create_task(monitor.watch())
            await until_free(monitor, 0.25)
            second[:] = [0.0, 0.125]
            await until_free(monitor, 0.875)
            health.set_serving([one.url], {})
            assert monitor.most_free() == 0.25
            first.clear()
            await until_free(monitor, None)
            first[:] = [0.5]
            await until_free(monitor, 0.5)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    asyncio.run(run())


async def until_free(monitor: FreeKvMonitor, share: float | None) -> None:
    while monitor.most_free() != share:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("num_waiting", "free"), [(0, 0.75), (2, 0.25), (4, 0.0)])
def test_requests_that_wait_in_an_engine_count_as_running_ones_do(
    num_waiting: int, free: float
) -> None:
    async def run() -> None:
        async with serve([0.25], num_waiting) as engine, aiohttp.ClientSession() as http:
            assert await ask_free_kv(http, engine) == free

    asyncio.run(run())


ADDRESSES = [EngineAddress(f"http://e-{n}", "") for n in range(2)]


class Told:
    """Engines that tell what `free` says."""

    def __init__(self, *free: float | None) -> None:
        self.free = dict(zip(ADDRESSES, free, strict=True))
        health = EngineHealth([address.url for address in ADDRESSES])
        self.monitor = FreeKvMonitor(self.ask, ADDRESSES, health, every_s=0.01)
        self.loads = [EngineLoad(address) for address in ADDRESSES]

    async def ask(self, engine: EngineAddress) -> float | None:
        return self.free[engine]

    @asynccontextmanager
    async def admission(self, min_free: float, kv_len: int) -> AsyncIterator[KvAdmission]:
        watching = asyncio.create_task(self.monitor.watch())
        while self.monitor.most_free() is None:
            await asyncio.sleep(0.001)
        yield KvAdmission(self.monitor, lambda: self.loads, min_free, kv_len)
        watching.cancel()


def test_requests_go_to_engines_with_room_and_count_there_until_the_engine_tells_again() -> None:
    told = Told(0.5, 0.125)

    async def run() -> None:
        async with told.admission(0.25, kv_len=8) as admission:
            first, second = told.loads
            assert admission.choose_with_free_kv([first, second]) == [first]
            assert admission.choose_with_free_kv([second]) == [second]
            admission.take(first, 2)
            assert told.monitor.free(first.address.url) == 0.25
            admission.take(first, 1)
            assert admission.choose_with_free_kv([first, second]) == [first, second]
            told.free[second.address] = None
            await until_free(told.monitor, None)
            assert admission.choose_with_free_kv([first, second]) == [first, second]
            assert told.monitor.free(first.address.url) == 0.5

    asyncio.run(run())


def test_requests_wait_in_their_order_until_an_engine_has_room() -> None:
    told = Told(0.125, 0.0)
    begun: list[int] = []

    async def run() -> None:
        may_post = asyncio.Event()
        may_post.set()
        async with asyncio.timeout(DEADLINE_S), told.admission(0.25, kv_len=1) as admission:

            async def post(number: int) -> None:
                await admission.wait(may_post)
                begun.append(number)
                admission.take(told.loads[0], 1)

            with told.loads[1].request():
                waiting = [asyncio.create_task(post(number)) for number in range(3)]
                await asyncio.sleep(0.1)
                assert begun == []
                told.free[ADDRESSES[0]] = 1.0
                await asyncio.gather(*waiting)
            assert begun == [0, 1, 2]

    asyncio.run(run())


def test_one_request_goes_on_where_no_engine_has_room_and_none_while_posts_are_held() -> None:
    told = Told(0.0, 0.0)

    async def run() -> None:
        may_post = asyncio.Event()
        async with asyncio.timeout(DEADLINE_S), told.admission(0.25, kv_len=1) as admission:
            waiting = asyncio.create_task(admission.wait(may_post))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            may_post.set()
            await waiting

    asyncio.run(run())
