"""Starts threads whose current device is that of their work.

Each thread begins on CUDA's first device. What a thread makes without naming a device would lie
there, with a context beside those of the rank that owns that GPU.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch


def start_thread(
    device: torch.device, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = ""
) -> Thread:
    """Start a daemon thread that calls target(*args), with `device` as its current device."""

    def run() -> None:
        enter_device(device)
        target(*args)

    thread = Thread(target=run, name=name or None, daemon=True)
    thread.start()
    return thread


def open_pool(device: torch.device, num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of at most `num_threads` threads whose current device is `device`."""
    return ThreadPoolExecutor(num_threads, name, initializer=enter_device, initargs=(device,))


def enter_device(device: torch.device) -> None:
    """Make `device` the current device of the calling thread; the host is none."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
