"""This system's gateway with its recorder, in a process of its own, before the stand-in engine.

It prints its port and the key of each session, and at the end of its input what it measured:
lag of the event loop, CPU time, and memory per episode.
"""

import argparse
import asyncio
import sys
import time

import orjson
import psutil

from agents_lag import Lag
from agents_recorder import check, open_recorders
from mcore_rl.agents.gateway.gateway import Gateway, collect_garbage_rarely


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stop-id", type=int, required=True)
    args = parser.parse_args()
    process = psutil.Process()
    recorders = open_recorders(args.model, args.stop_id, args.engine_url)
    async with recorders as make_recorder, Gateway(chr) as gateway:
        before_bytes = process.memory_info().rss
        chats = [make_recorder(number) for number in range(args.episodes)]
        sessions = [gateway.open_session(chat) for chat in chats]
        targets = [["/v1/chat/completions", session.key] for session in sessions]
        start = {"port": int(gateway.url.rpartition(":")[2]), "targets": targets}
        print(orjson.dumps(start).decode(), flush=True)
        lag = Lag()
        began_s = time.process_time()
        await asyncio.to_thread(sys.stdin.read)
        grown_bytes = process.memory_info().rss - before_bytes
        figures = {
            **lag.stop("gateway"),
            "kib_per_episode": grown_bytes / args.episodes / 1024,
            "gateway_cpu_s": time.process_time() - began_s,
        }
        check(chats, args.turns)
        print(orjson.dumps(figures).decode(), flush=True)


if __name__ == "__main__":
    with collect_garbage_rarely():
        asyncio.run(main())
