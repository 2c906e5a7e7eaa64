"""rLLM's gateway (rllm-model-gateway), in a process of its own, before the stand-in engine.

It keeps traces in memory and prints its port.
"""

# Its packages are installed by agents.py, beside the environment.
# pyright: reportMissingImports=false

import argparse
import asyncio
import socket
import sys
import time

import orjson
import psutil
import uvicorn
import uvloop
from rllm_model_gateway.models import GatewayConfig, WorkerConfig
from rllm_model_gateway.server import create_app

from mcore_rl.agents.gateway.gateway import collect_garbage_rarely


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    args = parser.parse_args()
    config = GatewayConfig(
        workers=[WorkerConfig(url=f"{args.engine_url}/v1")], store_worker="memory"
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create_app(config), log_level="error", access_log=False, backlog=4096)
    )
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    targets = [[f"/sessions/{number}/v1/chat/completions", ""] for number in range(args.episodes)]
    start = {"port": listener.getsockname()[1], "targets": targets}
    print(orjson.dumps(start).decode(), flush=True)
    began_s = time.process_time()
    await asyncio.to_thread(sys.stdin.read)
    grown_bytes = process.memory_info().rss - before_bytes
    figures = {
        "kib_per_episode": grown_bytes / args.episodes / 1024,
        "gateway_cpu_s": time.process_time() - began_s,
    }
    print(orjson.dumps(figures).decode(), flush=True)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    with collect_garbage_rarely():  # as before this system's gateway
        uvloop.run(main())  # as uvicorn does by itself
