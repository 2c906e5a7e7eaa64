"""Worker classes that the tests of mcore_rl.cluster run on real Ray."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    dp: int
    tp: int
    owns_output: bool


class Worker:
    """Rank `rank` of a layout with tensor-parallel size 2."""

    def __init__(self, rank: int) -> None:
        if rank == 99:
            raise ValueError("no rank 99 here")
        self.rank = rank
        self.children: list[subprocess.Popen[bytes]] = []
        self.num_calls = 0

    def coordinate(self) -> Place:
        return Place(dp=self.rank // 2, tp=self.rank % 2, owns_output=self.rank % 2 == 1)

    def scaled(self, values: list[int], factor: int) -> tuple[int, list[int]]:
        return self.rank, [factor * value for value in values]

    def count(self, on: list[int]) -> int:
        """Return how often this was called."""
        self.num_calls += 1
        time.sleep(on[0])
        return self.num_calls

    def speak(self) -> None:
        print(f"said by {self.rank}")
        os.write(2, f"written by {self.rank}\n".encode())

    def speak_at_length(self, num_bytes: int) -> None:
        print("x" * num_bytes, flush=True)

    def fail(self, on: int) -> None:
        """One rank raises, from below a library's frames; the others wait for it."""
        if self.rank != on:
            time.sleep(600)
        json.loads("{}", object_hook=self._raise)

    def _raise(self, _: object) -> None:
        raise ValueError(f"bad value on {self.rank}")

    def sleep(self, on: int) -> None:
        if self.rank == on:
            time.sleep(600)

    def die(self, on: int, how: str) -> None:
        """One rank dies; of the others, one raises, as a collective with a dead peer does."""
        if self.rank == on:
            time.sleep(0.2)
            deaths = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(3),
                "sys.exit": lambda: sys.exit(4),
                "segfault": lambda: ctypes.string_at(0),
            }
            deaths[how]()
        if self.rank == 0:
            raise RuntimeError("connection closed by peer")
        time.sleep(600)

    def check(self) -> None:
        if self.children and self.children[0].poll() is not None:
            raise RuntimeError(f"server ended with {self.children[0].returncode}")

    def start_child(self) -> int:
        self.children.append(subprocess.Popen(["sleep", "600"]))
        return self.children[0].pid

    def sleep_long(self) -> None:
        time.sleep(600)

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def pause(self) -> int:
        answer = 41
        breakpoint()
        return answer

    def spin(self) -> None:
        while True:
            pass


class BuiltWorker(Worker):
    """Is built as a rank of a model, and tells with whom it would meet."""

    def __init__(self, spec: object, rank: int, address: str, port: int, *_: object) -> None:
        super().__init__(rank)
        self.port = port

    def close(self, timeout_s: float) -> None:
        """End what is under way beside calls, as a rank of a model does."""

    def break_gpu(self, on: int) -> None:
        if self.rank == on:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        raise RuntimeError("Connection closed by peer")

    def tell(self) -> tuple[int, int]:
        return self.rank, self.port
