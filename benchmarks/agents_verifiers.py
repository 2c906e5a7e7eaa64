"""The interception server of verifiers, in a process of its own, before the stand-in engine.

It relays chats to the engine and keeps the graph of messages of each episode. It prints its port.
"""

# Its packages are installed by agents.py, beside the environment.
# pyright: reportMissingImports=false

import argparse
import asyncio
import os
import sys
import time

import orjson
import psutil
from verifiers.v1 import AgentConfig
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

from mcore_rl.agents.gateway.gateway import collect_garbage_rarely


def make_session(engine_url: str, number: int) -> RolloutSession:
    client = EvalClientConfig(base_url=f"{engine_url}/v1", api_key_var="STAND_IN_KEY")
    trace = Trace(
        task=TraceTask(type="Task", data=TaskData(idx=number)),
        agent=AgentInfo(config=AgentConfig()),
    )
    return RolloutSession(ctx=ModelContext(model="policy", client=client), trace=trace)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    args = parser.parse_args()
    os.environ["STAND_IN_KEY"] = "none"
    process = psutil.Process()
    async with InterceptionServer() as server:
        before_bytes = process.memory_info().rss
        sessions = [make_session(args.engine_url, number) for number in range(args.episodes)]
        keys = [server.register(session)[0] for session in sessions]
        targets = [["/v1/chat/completions", key] for key in keys]
        start = {"port": server.port, "targets": targets}
        print(orjson.dumps(start).decode(), flush=True)
        began_s = time.process_time()
        await asyncio.to_thread(sys.stdin.read)
        grown_bytes = process.memory_info().rss - before_bytes
        figures = {
            "kib_per_episode": grown_bytes / args.episodes / 1024,
            "gateway_cpu_s": time.process_time() - began_s,
            "recorded_turns": sum(session.trace.num_turns for session in sessions),
        }
        print(orjson.dumps(figures).decode(), flush=True)


if __name__ == "__main__":
    with collect_garbage_rarely():  # as before this system's gateway
        asyncio.run(main())
