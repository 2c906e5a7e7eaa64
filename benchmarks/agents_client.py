"""Plays episodes against a gateway, in a process of its own; reads a job, prints a JSON line.

An episode has a connection of its own, and sends its whole conversation at each turn. The
overhead of a turn is the time from its request to its answer, less the engine's latency.
"""

import asyncio
import random
import sys
import time

import orjson
import uvloop

from agents_http import Connection
from agents_lag import Lag, percentiles
from agents_workload import answer_text, user_text


class Client:
    """Plays the episodes of a job.

    job   port; targets: [path, key] per episode; turns; at_once: episodes at a time; ramp_s: they
          begin within that time; latency_s of the engine; seed
    """

    def __init__(self, job: dict) -> None:
        self._job = job
        self._random = random.Random(job["seed"])
        self._places = asyncio.Semaphore(job["at_once"])
        self.overheads_s: list[float] = []

    async def run(self) -> dict[str, float]:
        job = self._job
        lag = Lag()
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        starts_s = [self._random.uniform(0, job["ramp_s"]) for _ in job["targets"]]
        await asyncio.gather(*(self._episode(i, starts_s[i]) for i in range(len(starts_s))))
        seconds = time.perf_counter() - began_s
        num_turns = len(self.overheads_s)
        assert num_turns == len(job["targets"]) * job["turns"]
        return {
            "requests": num_turns,
            "seconds": seconds,
            "requests_per_s": num_turns / seconds,
            **percentiles(self.overheads_s),
            **lag.stop("client"),
            "client_cpu_s": time.process_time() - began_cpu_s,
        }

    async def _episode(self, number: int, start_s: float) -> None:
        job = self._job
        await asyncio.sleep(start_s)
        path, key = job["targets"][number]
        messages: list[dict[str, str]] = []
        async with self._places:
            connection = await Connection.open("127.0.0.1", job["port"])
            for turn in range(job["turns"]):
                messages.append({"role": "user", "content": user_text(job["seed"], number, turn)})
                body = orjson.dumps({"model": "policy", "messages": messages})
                began_s = time.perf_counter()
                status, data = await connection.post(path, body, key)
                self.overheads_s.append(time.perf_counter() - began_s - job["latency_s"])
                if status != 200:
                    raise RuntimeError(f"{path.split('/')[-1]}: HTTP {status}: {data[:300]!r}")
                content = orjson.loads(data)["choices"][0]["message"]["content"]
                assert content == answer_text(), f"not the engine's answer: {content[:80]!r}"
                messages.append({"role": "assistant", "content": content})
            connection.close()


async def main() -> None:
    print(orjson.dumps(await Client(orjson.loads(sys.stdin.buffer.read())).run()).decode())


if __name__ == "__main__":
    uvloop.run(main())
