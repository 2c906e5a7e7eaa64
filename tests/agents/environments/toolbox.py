"""Tools and rewards for the tests of adapters; a worker loads them by the name of this file."""

import asyncio
import os
import threading
import time
from typing import Any, Literal

HERE = os.path.abspath(__file__)
MEETING = threading.Barrier(3, timeout=20)


def add(first: int, second: int = 1) -> int:
    """Add two numbers,
    exactly.

    Args:
        first: one of them,
            the first
        second (int): the other

    Returns:
        their sum
    """
    return first + second


async def wait(seconds: float, _state: dict[str, Any] | None = None) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    assert _state is not None
    _state["waits"] = _state.get("waits", 0) + 1
    return f"waited {_state['waits']} times"


def block(seconds: float) -> str:
    """Wait in a thread."""
    time.sleep(seconds)
    return "blocked"


def meet() -> str:
    """Wait in a thread until three calls are under way at once."""
    MEETING.wait()
    return "met"


async def come() -> str:
    """Wait for the others of `meet` without blocking the event loop."""
    await asyncio.to_thread(MEETING.wait)
    return "came"


def long(kind: Literal["x", "y"], _task: dict[str, Any] | None = None) -> str:
    """Answer at length."""
    assert _task is not None
    return kind * 100 + str(_task["index"])


def fail(reason: str) -> str:
    """Fail."""
    raise LookupError(reason)


def untyped(value) -> str:
    return value


def reward(conversation: list[dict[str, Any]], task: dict[str, Any]) -> float:
    return float(conversation[-1]["content"] == str(task["ground_truth"])) + len(conversation) / 100
