"""Environments for the tests of workers and pools; a worker loads them by the name of this file."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step

HERE = os.path.abspath(__file__)


class Countdown:
    """Is done after `turns` answers; answers in capitals name what it shall do."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns
        self.thread = threading.get_ident()

    def reset(self, task: Mapping[str, Any]) -> Start:
        if task.get("extra_info", {}).get("raises"):
            raise LookupError("no such level")
        return Start([{"role": "user", "content": f"task {task['index']}"}])

    def step(self, message: Message) -> Step:
        word, _, argument = message["content"].partition(" ")
        match word:
            case "RAISE":
                raise RuntimeError("the dragon woke")
            case "SLEEP":
                time.sleep(float(argument))
            case "DIE":
                os._exit(3)
            case "HOLD":  # holds Python's lock: no other thread of the worker goes on
                sum(range(10**12))
            case "ALLOCATE":
                self.ballast = bytearray(int(argument))
                self.ballast[::4096] = b"x" * len(self.ballast[::4096])
            case "DETACH":
                subprocess.Popen(["sleep", argument], start_new_session=True)
            case "PRINT":
                print(argument, flush=True)
            case "END":
                return Step(done=True, end_reason=argument)
            case "NAN":
                return Step(reward=float("nan"))
        self.left -= 1
        same = threading.get_ident() == self.thread
        return Step(
            [{"role": "user", "content": f"{self.left} left"}],
            reward=1.0,
            done=self.left == 0,
            metrics={"same_thread": float(same), "pid": float(os.getpid())},
        )

    def close(self) -> None:
        print("closed", flush=True)


class Coroutines:
    """The same by coroutines; a closed episode appends to the file `closed_log`.

    The answer MEET waits until ten episodes of the worker have got it.
    """

    ten = asyncio.Barrier(10)

    def __init__(self, closed_log: str = "") -> None:
        self.closed_log = closed_log

    async def reset(self, task: Mapping[str, Any]) -> Start:
        await asyncio.sleep(0)
        return Start([{"role": "user", "content": "go"}], [{"type": "function"}])

    async def step(self, message: Message) -> Step:
        if message["content"] == "MEET":
            await asyncio.wait_for(self.ten.wait(), 20)
        else:
            await asyncio.sleep(float(message["content"]))
        return Step(done=True, end_reason="parse_error")

    async def close(self) -> None:
        if self.closed_log:
            with open(self.closed_log, "a") as file:
                file.write("closed\n")


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], within_s: float = 15.0) -> list[int]:
    """Wait until none of these processes runs; return those that still do."""
    deadline_s = time.monotonic() + within_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left
