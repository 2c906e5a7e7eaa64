"""This system's gateway, in a process of its own, before the stand-in engine.

It prints its port and the key of each session, and at the end of its input what it measured:
lag of the event loop and memory per episode. `--chat` names the recorder behind the sessions.
"""

import argparse
import asyncio
import importlib
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import psutil

from agents_workload import TURN_LEN
from mcore_rl.agents.gateway import EpisodeChat, Gateway, rare_collections
from mcore_rl.agents.messages import Answer, ChatRequest, Completion

LAG_STEP_S = 0.01
ChatFactory = Callable[[str, aiohttp.ClientSession], EpisodeChat]


class EngineChat:
    """Asks the engine with the conversation's tokens and keeps those of every turn.

    It does not tokenize: a turn adds TURN_LEN tokens.
    """

    def __init__(self, engine_url: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{engine_url}/generate"
        self._http = http
        self._ids = array("i")
        self._turns: list[Completion] = []
        self._rewards: list[tuple[float, int | None]] = []

    async def complete(self, request: ChatRequest) -> Completion:
        self._ids.extend(range(len(self._ids), len(self._ids) + TURN_LEN))
        prompt_ids = tuple(self._ids)
        body = orjson.dumps({"input_ids": prompt_ids, "return_logprob": True})
        async with self._http.post(self._url, data=body) as response:
            answer = orjson.loads(await response.read())
        token_ids = tuple(answer["output_ids"])
        pairs = answer["meta_info"]["output_token_logprobs"]
        message = {"role": "assistant", "content": answer["text"]}
        completion = Completion(
            turn=len(self._turns),
            answer=Answer(message),
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=tuple(pair[0] for pair in pairs),
            finish_reason="stop",
        )
        self._ids.extend(token_ids)
        self._turns.append(completion)
        return completion

    def add_reward(self, reward: float, turn: int | None) -> None:
        self._rewards.append((reward, turn))


async def measure_lag(lags_s: list[float]) -> None:
    """Note by how much the event loop is late, every LAG_STEP_S."""
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(LAG_STEP_S)
        lags_s.append(time.perf_counter() - began_s - LAG_STEP_S)


def find(name: str) -> Any:
    """Return what `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--chat", default="agents_gateway:EngineChat")
    args = parser.parse_args()
    make_chat: ChatFactory = find(args.chat)
    process = psutil.Process()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, Gateway(chr) as gateway:
        before_bytes = process.memory_info().rss
        sessions = [
            gateway.open_session(make_chat(args.engine_url, http)) for _ in range(args.episodes)
        ]
        targets = [["/v1/chat/completions", session.key] for session in sessions]
        start = {"port": int(gateway.url.rpartition(":")[2]), "targets": targets}
        print(orjson.dumps(start).decode(), flush=True)
        lags_s: list[float] = []
        lag = asyncio.create_task(measure_lag(lags_s))
        await asyncio.to_thread(sys.stdin.read)
        lag.cancel()
        grown_bytes = process.memory_info().rss - before_bytes
        lags_s.sort()
        figures = {
            "lag_p50_ms": 1000 * lags_s[len(lags_s) // 2],
            "lag_p99_ms": 1000 * lags_s[len(lags_s) * 99 // 100],
            "kib_per_episode": grown_bytes / args.episodes / 1024,
            "gateway_cpu_s": time.process_time(),
        }
        print(orjson.dumps(figures).decode(), flush=True)


if __name__ == "__main__":
    with rare_collections():
        asyncio.run(main())
