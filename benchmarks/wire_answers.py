"""An HTTP server that answers as SGLang's /generate does, with tokens and experts made up at once.

Log-probs, ids and base64 experts have the real wire format and size; no model computes them.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
from aiohttp import web

from mcore_rl.rollout.engine_spec import EngineAddress

VOCABULARY = 100


def make_answer(num_prompt: int, num_tokens: int, layers: int, top_k: int, experts: int) -> bytes:
    """Return the JSON body for a response of `num_tokens` tokens, from weights of version 0."""
    generator = np.random.default_rng(num_tokens)
    ids = generator.integers(3, VOCABULARY, num_tokens).tolist()
    logprobs = (-generator.exponential(0.5, num_tokens)).tolist()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": 1},
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, ids, strict=True)],
        "weight_versions": [{"start": 0, "end": num_tokens, "version": "0"}],
    }
    if layers:
        rows = num_prompt + num_tokens - 1
        first = generator.integers(0, experts, (rows, layers, 1), dtype=np.int32)
        chosen = (first + np.arange(top_k, dtype=np.int32)) % experts
        meta["routed_experts"] = base64.b64encode(chosen.tobytes()).decode()
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def serve(layers: int, top_k: int, experts: int) -> None:
    """Serve until stdin closes; print the port first."""
    answers: dict[tuple[int, int], bytes] = {}
    last_s = 0.0

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal last_s
        body = await request.json()
        key = (len(body["input_ids"]), body["sampling_params"]["max_new_tokens"])
        if key not in answers:
            answers[key] = make_answer(*key, layers, top_k, experts)
        response = web.Response(body=answers[key], content_type="application/json")
        await response.prepare(request)
        last_s = time.time()
        return response

    async def last(request: web.Request) -> web.Response:
        return web.json_response({"last_s": last_s})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/last", last)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.read)

    asyncio.run(run())


def last_answer_s(engine: EngineAddress) -> float:
    """Return when the server last began to send an answer."""
    with urllib.request.urlopen(f"{engine.url}/last") as response:
        return json.load(response)["last_s"]


def answer_bytes(engine: EngineAddress, num_prompt: int, num_tokens: int) -> int:
    """Return the size of an answer."""
    body = {"input_ids": [3] * num_prompt, "sampling_params": {"max_new_tokens": num_tokens}}
    request = urllib.request.Request(f"{engine.url}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return len(response.read())


@contextlib.contextmanager
def answering(number: int, layers: int) -> Iterator[list[EngineAddress]]:
    """Run `number` servers for the length of the block."""
    command = [sys.executable, __file__, f"--layers={layers}"]
    servers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        ports = [int(server.stdout.readline()) for server in servers if server.stdout]
        yield [EngineAddress(f"http://127.0.0.1:{port}", "none") for port in ports]
    finally:
        for server in servers:
            server.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    arguments = parser.parse_args()
    serve(arguments.layers, arguments.top_k, arguments.experts)
