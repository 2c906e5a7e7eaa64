"""Measures how long requests wait when new weights arrive while an engine decodes.

Requests decode all the time; each reads its tokens as they come. The ways of refit.py take turns to
bring new weights. All pause the engine in SGLang's mode "retract": requests keep their tokens, and
the KV cache is computed again from prompt and tokens with the new weights.

stall    the longest time between two tokens of a request around a sync, re-prefill included;
         the longest of all requests
usual    the mean time between two tokens before the sync: a busy reader meets several at once
sync     seconds of the whole sync, with decoding beside it

Medians of the turns. The last line is JSON.
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from refit import OURS, Scene, running
from sync_model import SHAPES, Case

WAYS = (OURS, "gather, each tensor", "gather, flat, gloo")
WARM_TOKENS = 12
"""Tokens that each request reads before a sync, and after it."""
TIMEOUT_S = 300.0
POLL_S = 0.002


class Request(threading.Thread):
    """Reads the tokens of one request and notes when each came."""

    def __init__(self, url: str, prompt_len: int, max_new: int, index: int) -> None:
        super().__init__(daemon=True)
        self._asked = _asking(
            url,
            "/generate",
            input_ids=[(7 * index + i) % 1000 for i in range(prompt_len)],
            sampling_params={"max_new_tokens": max_new, "temperature": 1, "ignore_eos": True},
            stream=True,
        )
        self.came_s: list[float] = []

    def run(self) -> None:
        with urllib.request.urlopen(self._asked, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.came_s.append(time.perf_counter())

    def wait_for(self, num_tokens: int) -> None:
        until_s = time.perf_counter() + TIMEOUT_S
        while len(self.came_s) < num_tokens:
            assert self.is_alive(), f"a request ended after {len(self.came_s)} tokens"
            assert time.perf_counter() < until_s, f"no token {num_tokens} in {TIMEOUT_S:.0f} s"
            time.sleep(POLL_S)


def _asking(url: str, path: str, **body: Any) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url + path, json.dumps(body).encode(), headers)


@contextmanager
def decoding(url: str, args: argparse.Namespace) -> Iterator[list[Request]]:
    """Have requests under way in the body, each with its first tokens read."""
    requests = [
        Request(url, args.prompt_len, args.max_new, index) for index in range(args.requests)
    ]
    for request in requests:
        request.start()
    try:
        for request in requests:
            request.wait_for(WARM_TOKENS)
        yield requests
    finally:
        with urllib.request.urlopen(_asking(url, "/abort_request", abort_all=True)):
            pass  # the answer is empty
        for request in requests:
            request.join(TIMEOUT_S)


def take_turn(scene: Scene, way: str, args: argparse.Namespace) -> dict[str, float]:
    """Sync once while requests decode; return seconds of stall, usual step and sync."""
    scene.change_weights()
    with decoding(scene.url, args) as requests:
        began_s = time.perf_counter()
        sync_s = scene.ways[way].send()
        ended_s = time.perf_counter()
        for request in requests:
            request.wait_for(len(request.came_s) + WARM_TOKENS)
    gaps = [pair for request in requests for pair in pairwise(request.came_s)]
    around = [b - a for a, b in gaps if b > began_s and a < ended_s + 0.001]
    before = [b - a for a, b in gaps if b <= began_s]
    return {"stall": max(around), "usual": fmean(before), "sync": sync_s}


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of a case and return its figures."""
    kv_cache_len = args.requests * (args.prompt_len + args.max_new + 64)
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="sync_pause_") as folder,
        running(case, Path(folder), args, kv_cache_len, args.requests) as scene,
    ):
        scene.set_up()
        for way in WAYS * args.repeats:
            turns[way].append(take_turn(scene, way, args))
    print(f"\n{case.name}: {args.requests} requests, prompts of {args.prompt_len}")
    print(f"  {'seconds':24s}{'stall':>9s}{'usual':>9s}{'sync':>9s}")
    figures = {}
    for way, taken in turns.items():
        figures[way] = {name: round(median(t[name] for t in taken), 4) for name in taken[0]}
        print(f"  {way:24s}" + "".join(f"{value:9.3f}" for value in figures[way].values()))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=128, help="MiB of weights")
    parser.add_argument("--kinds", default="large", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--max-new", type=int, default=1500)
    parser.add_argument("--trainer-ranks", type=int, default=2)
    parser.add_argument("--engine-tp", type=int, default=1)
    args = parser.parse_args()
    cases = [Case(args.size, kind) for kind in args.kinds.split(",")]
    print(json.dumps({case.name: measure(case, args) for case in cases}))


if __name__ == "__main__":
    main()
