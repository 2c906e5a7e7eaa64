"""Corpora for the tests of search, and servers in processes of their own."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from mcore_rl.process.network import find_free_port
from mcore_rl.services.search.layout import Hit
from mcore_rl.services.search.replay import Recording
from tests.support.policy import ROOT

START_S = 120.0


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    rows = [{"id": str(i), "contents": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_texts(num: int, seed: int = 0, num_words: int = 50) -> list[str]:
    rng = random.Random(seed)
    return [
        f"title{i}\n" + " ".join(f"w{rng.randrange(num_words)}" for _ in range(rng.randint(1, 30)))
        for i in range(num)
    ]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mcore_rl.cli", "search", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def record(path: Path, answers: dict[str, str], topk: int = 3) -> Path:
    """Write a recording in which each query has one passage."""
    with closing(Recording(path, "record")) as recording:
        for query, contents in answers.items():
            recording.add(query, topk, [Hit({"id": query, "contents": contents}, 1.0)])
    return path


class Served:
    """`mcore-rl search serve` at a port that stays the same when it is started again."""

    def __init__(self, *arguments: str) -> None:
        self.port = find_free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self._arguments = arguments
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start without waiting until it serves."""
        words = command("serve", "--port", str(self.port), *self._arguments)
        self.process = subprocess.Popen(
            words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.search(r"^serving .* at http", line), line + self.process.stdout.read()

    def kill(self) -> None:
        """End it by kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    server = Served(*arguments)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()
