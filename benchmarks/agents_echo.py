"""A bare aiohttp server before the stand-in engine: what the machine and HTTP take by themselves.

It passes each body on to the engine and its answer back, and keeps nothing. It prints its port.
"""

import argparse
import asyncio
import sys
import time

import aiohttp
import orjson
from aiohttp import web

from agents_lag import Lag
from mcore_rl.agents.gateway.gateway import collect_garbage_rarely


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    args = parser.parse_args()
    url = f"{args.engine_url}/v1/chat/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def pass_on(request: web.Request) -> web.Response:
            async with http.post(url, data=await request.read()) as answer:
                data = await answer.read()
            return web.Response(body=data, content_type="application/json")

        application = web.Application()
        application.router.add_post("/v1/chat/completions", pass_on)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        targets = [["/v1/chat/completions", ""]] * args.episodes
        start = {"port": runner.addresses[0][1], "targets": targets}
        print(orjson.dumps(start).decode(), flush=True)
        lag = Lag()
        began_s = time.process_time()
        await asyncio.to_thread(sys.stdin.read)
        figures = {**lag.stop("gateway"), "gateway_cpu_s": time.process_time() - began_s}
        print(orjson.dumps(figures).decode(), flush=True)
        await runner.cleanup()


if __name__ == "__main__":
    with collect_garbage_rarely():
        asyncio.run(main())
